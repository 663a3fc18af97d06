"""The rules of DTensor that give something else than dense tensors do, by torch's own samples of its operations.

`tests/runtime/every_operation.py` compares the samples on tensors of a grid.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

# What DTensor writes to where it belongs; by another rule it may write to a part that it has moved.
WRITES = ("copy_", "zero_", "fill_", "detach_", "requires_grad_")
# There is a rule, and it gives other numbers or an error of shapes.
WRONG = ("convolution", "convolution_backward", "index_put", "index_add", "argmax", "argmin")
ALONG = ("cumsum", "cumprod", "logcumsumexp")
# A list among their arguments has sizes, of which a number has none.
SIZED = (
    "new_zeros", "new_empty", "new_ones", "new_full", "new_empty_strided", "view", "_unsafe_view", "reshape", "expand",
    "permute", "repeat", "as_strided",
)  # fmt: skip
# Of a view that only says what its numbers mean, DTensor's operations forget it.
PHYSICAL = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
# Words of the errors by which DTensor says that it has no rule.
LACKS = ("sharding strategy", "placement", "sharding prop", "stack expects each tensor", "not supported with dtensor")


@cache
def is_mean(func: Any) -> bool:
    """Return whether an operation is a loss that may be a mean: of its backward DTensor takes that of a shard."""
    return any(argument.name == "reduction" for argument in func._schema.arguments)


def has_wrong_rule(func: Any, name: str, args: Any) -> bool:
    """Return whether DTensor has a rule for an operation and its operands that gives something else than the whole."""
    if is_mean(func):
        return True
    if name not in SIZED and any(type(x) is list and not x for x in args[1:]):
        return True  # no dims, which are all of them: it reduces this rank's shard alone
    if name in ALONG:
        return isinstance(args[1], int) and args[1] < 0  # it takes -1 for another dim than the last one
    # It takes indices of one dim each, masks of several too.
    return name in WRONG or (name == "index" and any(x is not None and x.dtype is torch.bool for x in args[1]))


def lacks_rule(error: BaseException) -> bool:
    """Return whether an error of DTensor says that it has no rule for an operation and its operands."""
    return any(word in str(error).lower() for word in LACKS)


def is_odd(placement: Any) -> bool:
    """Whether a placement is a sum that is not finished, or a shard that is no block."""
    return placement.is_partial() or type(placement).__name__ == "_StridedShard"


def is_sound(x: Any) -> bool:
    """Return whether a result has the sizes that it says: DTensor keeps the rule of `topk`, also for another k."""
    if not isinstance(x, DTensor) or any(map(is_odd, x.placements)):
        return True
    counts = [1] * x.dim()
    for placement, count in zip(x.placements, x.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            counts[placement.dim] *= count
    local = x._local_tensor.shape
    # Where a dim is not divided evenly ranks have other sizes, and all of them have to find the same.
    return len(local) == x.dim() and all(
        size % count or have * count == size for have, size, count in zip(local, x.shape, counts, strict=True)
    )


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
