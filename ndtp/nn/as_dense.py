"""`as_dense`: code that was written for whole plain tensors, on parameters that are split.

Optimizers that act element by element (SGD, AdamW) need nothing.  Others keep statistics of rows, as plain tensors or
through sums that DTensor leaves unfinished, and stop at the first operation on both.  While this is on, each operation
gives what it gives on the whole: sums are finished where they arise, a plain tensor beside a split one is taken for one
that every rank has, and the split one is gathered for it, one tensor at a time, unless it is what is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ndtp.compute.torch_calls import Arguments, TorchFunction
from ndtp.errors import LayoutError
from ndtp.runtime.arrival import is_plain, tensors_in
from ndtp.runtime.grid_parts import on_every_rank
from ndtp.runtime.grid_tensor import GridTensor

FUSED = "_fused_"  # begins the name of an optimizer's step as one function
# Of a gradient autograd itself knows how it lies.
AS_THEY_ARE = ("__get__", "__set__", "full_tensor", "redistribute", "to_local", "grad", "backward")


class as_dense(TorchFunctionMode):  # used as `with ndtp.nn.as_dense():`
    """A context in which torch's operations on DTensors, and on DTensors and plain tensors, work on whole tensors.

        with ndtp.nn.as_dense():
            optimizer.step()  # Adafactor, for one

    Collectives run wherever a result needs other ranks' shards, so all ranks do the same.
    """

    def __torch_function__(self, func: TorchFunction, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs, name = kwargs or {}, str(getattr(func, "__name__", ""))
        tensors = tensors_in((args, kwargs))
        split = [x for x in tensors if not is_plain(x)]
        if not split or name in AS_THEY_ARE:
            return func(*args, **kwargs)
        if any(map(_is_of_numbers, tensors)):
            written = tensors_in((_written(name, args), kwargs.get("out")))
            is_whole = all(map(is_plain, written))  # of what is written, if anything
            if name.startswith(FUSED) and _are_mixed(_written(name, args)):
                raise LayoutError(
                    f"as_dense: {name} writes to split tensors and to whole ones of the same parameter\n"
                    "  fix: split the whole ones, as optimizer.load_state_dict does of what has a parameter's sizes"
                )
            bring = _gathered if is_whole else _on_every_rank(split[0])
            args, kwargs = _mapped(bring, args), _mapped(bring, kwargs)
        return _mapped(_finished, func(*args, **kwargs))


def _are_mixed(written: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether what is written of one parameter is split in part: its statistics, or itself, are whole."""
    of_each = zip(*(tensors for tensors in written if tensors), strict=False)
    return any(len({is_plain(x) for x in tensors if x.dim() or not is_plain(x)}) > 1 for tensors in of_each)


def _written(name: str, args: Arguments) -> Sequence[Any]:
    """Return the arguments that a function of torch writes into."""
    if name.startswith(FUSED):
        schema = getattr(torch.ops.aten, name).default._schema
        return [x for x, of in zip(args, schema.arguments, strict=False) if of.alias_info and of.alias_info.is_write]
    return args[:1] if _writes(name) else ()


def _writes(name: str) -> bool:
    """Whether a function of torch writes into its first argument: `add_`, `__setitem__`, `__iand__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def _is_of_numbers(x: Tensor) -> bool:
    """Whether a plain tensor is more than a number, which DTensors take: a mask without dims is an index as well."""
    return is_plain(x) and (x.dim() > 0 or x.dtype is torch.bool)


def _mapped(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, dict):
        return {key: _mapped(change, value) for key, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_mapped(change, value) for value in x)
    return x


def _gathered(x: Any) -> Tensor:
    return x if is_plain(x) else x.full_tensor()


def _on_every_rank(other: object) -> Callable[[Tensor], Tensor]:
    def wrapped(x: Tensor) -> Tensor:
        if not _is_of_numbers(x):
            return x
        made = on_every_rank(x, other)
        return GridTensor(made) if type(other) is GridTensor else made  # or padding would count beside it

    return wrapped


def _finished(x: Any) -> Tensor:
    """Return a tensor whose sums over ranks are finished."""
    if is_plain(x) or not any(placement.is_partial() for placement in x.placements):
        return x
    from torch.distributed.tensor import Replicate

    placements: Sequence[Any] = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)
