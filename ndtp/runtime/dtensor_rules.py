"""The operations whose rules DTensor has right, compared by torch's own samples of its operations.

`tests/runtime/every_operation.py` compares the samples on tensors of a grid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ndtp.compute.torch_calls import Arguments

LISTS = ("_foreach_", "_fused_", "_amp_")
# What DTensor writes to where it belongs; by another rule it may write to a part that it has moved.
WRITES = ("copy_", "zero_", "fill_", "detach_", "requires_grad_")
# Operations whose rules give what dense tensors do, beside those that go element by element.  Of the others DTensor has
# wrong rules for some: convolutions, poolings, scans, indices, `topk`, means in the backward of losses.
TRUSTED = frozenset((
    *WRITES, "detach", "clone", "_to_copy", "alias", "empty_like", "zeros_like", "ones_like", "full_like", "new_zeros",
    "new_empty", "new_ones", "new_full", "new_empty_strided", "equal", "is_same_size", "_local_scalar_dense",
    "sum", "mean", "linalg_vector_norm", "norm", "count_nonzero", "amax", "amin", "max", "min", "any", "all", "var",
    "mm", "addmm", "bmm", "baddbmm", "mv", "dot",
    "view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze", "select", "slice", "expand", "split",
    "split_with_sizes", "unbind", "cat", "stack",
))  # fmt: skip
# A list among their arguments has sizes, of which a number has none.
SIZED = (
    "new_zeros", "new_empty", "new_ones", "new_full", "new_empty_strided", "view", "_unsafe_view", "expand", "permute",
)  # fmt: skip
# Of a view that only says what its numbers mean, DTensor's operations forget it.
PHYSICAL = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
# Words of the errors by which DTensor says that it has no rule.
LACKS = ("sharding strategy", "placement", "sharding prop", "stack expects each tensor", "not supported with dtensor")


def is_trusted(func: Any, name: str, args: Arguments) -> bool:
    """Return whether DTensor has a rule for an operation and its operands that gives what dense tensors give."""
    if torch.Tag.pointwise in func.tags or name.startswith(LISTS):
        return True
    # A list of no dims is one of all dims, and DTensor reduces this rank's shard alone.
    return name in TRUSTED and (name in SIZED or not any(type(x) is list and not x for x in args[1:]))


def is_loss(func: Any) -> bool:
    """Return whether an operation is a loss, or the gradient of one, of tensors of the same sizes."""
    return any(argument.name == "reduction" for argument in func._schema.arguments)


def lacks_rule(error: BaseException) -> bool:
    """Return whether an error of DTensor says that it has no rule for an operation and its operands."""
    return any(word in str(error).lower() for word in LACKS)


def is_odd(placement: Any) -> bool:
    """Whether a placement is a sum that is not finished, or a shard that is no block."""
    return placement.is_partial() or type(placement).__name__ == "_StridedShard"


def box_of(dtensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this rank's shard of a DTensor begins, and its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return tuple(start), tuple(shape)


def dtensor_of(local: Tensor, spec: Any) -> DTensor:
    """Return a DTensor of a shard that lies as the one with this `_spec` does; outside of autograd.

    By the constructor that torch's own data parallelism takes: `from_local` takes 24 us, this 2.
    """
    if spec.tensor_meta is None or local.dtype is not spec.tensor_meta.dtype:
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    return DTensor(local, spec, requires_grad=False)
