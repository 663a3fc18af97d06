"""Collectives of a model's own code on split tensors: they send and receive whole ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ndtp.collectives.torch_patches import replaced
from ndtp.errors import LayoutError
from ndtp.split.copies import written
from ndtp.split.moving import cut
from ndtp.split.same_rows import given_whole, guard_rows
from ndtp.split.tensor import TABLE, SplitTensor, mapped, name_of, split_in
from ndtp.split.whole import whole

# By function: which argument is written to, and whether it is read before.
WRITTEN: dict[str, tuple[str, bool]] = {
    "all_reduce": ("tensor", True),
    "all_reduce_coalesced": ("tensors", True),
    "broadcast": ("tensor", True),
    "reduce": ("tensor", True),
    "recv": ("tensor", False),
    "irecv": ("tensor", False),
    "send": ("", False),
    "isend": ("", False),
    "all_gather": ("tensor_list", False),
    "all_gather_single": ("output_tensor", False),
    "all_gather_into_tensor": ("output_tensor", False),
    "gather": ("gather_list", False),
    "scatter": ("tensor", False),
    "reduce_scatter": ("output", False),
    "reduce_scatter_single": ("output", False),
    "reduce_scatter_tensor": ("output", False),
    "all_to_all": ("output_tensor_list", False),
    "all_to_all_single": ("output", False),
}


def _on_whole(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a collective with whole tensors, and take what it wrote into the shards of the tensors that it was given."""
    into, is_read = WRITTEN[name_of(func)]
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    for x in split_in([value for name, value in given.items() if is_read or name != into]):
        if x.spec.axes:
            x.spec.context.note(name_of(func), x.spec)
    change = {True: whole, False: _like_whole}
    made = {name: mapped(value, change[is_read or name != into]) for name, value in given.items()}
    with given_whole(split_in([*given.values()])[0], func):
        work = func(**made)
    if into and split_in(given.get(into)):
        if work is not None:
            work.wait()
        for x, result in zip(_leaves(given[into]), _leaves(made[into]), strict=True):
            if isinstance(x, SplitTensor):
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    x.copy_(cut(result, x.spec))
                written(x)
    return work


def _like_whole(x: SplitTensor) -> Tensor:
    return torch.empty(x.spec.sizes, dtype=x.dtype, device=x.device)


def _leaves(x: object) -> list[Any]:
    return [leaf for each in x for leaf in _leaves(each)] if isinstance(x, (list, tuple)) else [x]


@functools.cache
def guard_collectives() -> None:
    """Let torch's collectives take split tensors whole, also those that look at one of their arguments alone."""
    for name in WRITTEN:
        if hasattr(c10d, name):
            TABLE[getattr(c10d, name)] = _on_whole
    replaced("torch.distributed.distributed_c10d._check_tensor_list", _refusing_lists)
    guard_rows()


def _refusing_lists(given: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def check(param: Any, param_name: str) -> Any:
        if any(type(x) is SplitTensor for x in param or ()):
            raise LayoutError(
                f"parallelize: a collective of torch.distributed was given a list with {split_in(param)[0].spec}, of "
                "which this rank has a shard, beside a plain tensor\n  fix: x.gathered() gives the whole tensor"
            )
        return given(param, param_name)

    return check
