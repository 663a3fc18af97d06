"""Indices and slices, read and written: dims that are picked from are whole, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ndtp.compute.torch_calls import TorchFunction
from ndtp.split.copies import Copy, share_memory, version_of, written
from ndtp.split.elementwise import aligned
from ndtp.split.tensor import SplitTensor, enter, leave, rule
from ndtp.split.views import kept_dims, plain, view, with_dims_at, without
from ndtp.split.whole import whole


@rule(Tensor.__getitem__)
def item(func: Any, x: Any, key: object) -> Any:
    """Slices and picks of dims that are whole; a dim that is picked from is gathered, and no other."""
    if not isinstance(x, SplitTensor):
        return NotImplemented
    keys = _spelt_out(key, len(x.spec.sizes))
    if any(isinstance(k, Tensor) for k in keys) or any(isinstance(k, bool) for k in keys):
        return _picked(func, x, keys)
    return view(func, x, tuple(keys))


def _spelt_out(key: Any, count: int) -> list[Any]:
    """One key a dim of the tensor or of the result; lists and arrays are tensors, and an ellipsis is slices."""
    keys = [*map(_as_torch_has_it, key if isinstance(key, tuple) else [key])]
    used = sum(k.dim() if _is_mask(k) else 1 for k in keys if k is not None and k is not Ellipsis)
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (count - used)
    return keys


def _as_torch_has_it(key: Any) -> Any:
    """Return a key as a tensor or a number of Python, where it is one of another library."""
    if isinstance(key, Tensor):
        return whole(key)
    if isinstance(key, (list, range)) or getattr(key, "ndim", False):
        return torch.as_tensor(key)
    return int(key) if isinstance(key, Integral) and not isinstance(key, bool) else key


@rule(Tensor.__setitem__)
def set_item(func: TorchFunction, x: Any, key: Any, value: Any) -> object:
    """Write into places of dims that are whole; each rank writes into its part of the other dims."""
    if not isinstance(x, SplitTensor):
        return NotImplemented
    if isinstance(key, Tensor) and key.dtype == torch.bool and key.shape == x.shape and not isinstance(value, Tensor):
        x.masked_fill_(key, value)
        return None
    keys = _spelt_out(key, len(x.spec.sizes))
    lost = _lost(x, keys)
    if lost:
        less = without(x, lost)
        set_item(func, less, tuple(keys), value)
        Copy(x, less, version_of(x)).write()
        return None
    if isinstance(value, Tensor) and (value.dim() or value.requires_grad):
        with torch.no_grad():
            part = item(Tensor.__getitem__, x, tuple(keys))
        while value.dim() > part.dim() and value.shape[0] == 1:  # torch takes a value with ones in front
            value = value.squeeze(0)
        # Torch's own error for another size, which may be that of a shard.
        torch.empty(value.shape, device="meta").expand(part.shape)
        if isinstance(part, SplitTensor):
            spec = part.spec
            value = aligned(value, spec.context, spec.dims, spec.padded, spec.sizes)
        else:
            value = whole(value)
    shard = leave(x)
    if isinstance(value, Tensor) and share_memory(value, shard):  # x[i] *= 2
        value = value.clone()
    shard[tuple(keys)] = value
    written(x)
    return None


def _lost(x: SplitTensor, keys: Sequence[Any]) -> list[int]:
    """The dims that are split and must be whole for these keys."""
    bare = plain(x)
    if any(isinstance(k, (Tensor, bool)) for k in keys):
        at, stay = 0, []
        for k in keys:
            if isinstance(k, slice) and k.indices(x.spec.sizes[at]) == (0, x.spec.sizes[at], 1):
                stay.append(at)
            if k is not None:
                at += k.dim() if _is_mask(k) else 1
        lost = [d for d in x.spec.split_dims if d not in stay]
    else:
        kept = kept_dims(bare, bare[tuple(keys)])
        lost = [d for d in x.spec.split_dims if kept[d] is None]
    last = len(x.spec.sizes) - 1
    return lost if not x.spec.sections or last in lost else [*lost, last]


def _picked(func: Any, x: SplitTensor, keys: Sequence[Any]) -> Any:
    """Pick by whole tensors of indices; torch puts the result where the first of them stands, or in front."""
    if any(isinstance(k, bool) for k in keys):
        return NotImplemented
    dim = 0
    plain, advanced, others = list[tuple[int, int]](), list[int](), list[int]()
    for place, k in enumerate(keys):
        if not _selects(k):
            (advanced if isinstance(k, Tensor) else others).append(place)
        if k is None:
            continue
        if isinstance(k, slice) and k.indices(x.spec.sizes[dim]) == (0, x.spec.sizes[dim], 1):
            plain.append((place, dim))
        dim += k.dim() if _is_mask(k) else 1
    stay = {d for _, d in plain}
    lost = [d for d in x.spec.split_dims if d not in stay]
    if lost:
        x = without(x, lost)
    shard = leave(x)
    result = func(shard, tuple(keys))
    # Which dim of the result is each of those that stay: torch selects by single numbers before it picks by the others.
    count = max((1 if _is_mask(keys[place]) else keys[place].dim() for place in advanced), default=0)
    is_between = any(advanced[0] < place < advanced[-1] for place in others) if advanced else False
    where: list[int | None] = [None] * len(x.spec.sizes)
    for out, place in enumerate(others):
        if is_between or (advanced and place > advanced[0]):
            out += count
        for d in (d for p, d in plain if p == place):
            where[d] = out
    sizes = list(result.shape)
    for d, o in enumerate(where):
        if o is not None:
            sizes[o] = x.spec.sizes[d]
    return enter(result.view_as(result), with_dims_at(x.spec, sizes, where))


def _is_mask(key: object) -> bool:
    return isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8)


def _selects(key: object) -> bool:
    """Return whether a key takes one place of a dim, and the dim with it."""
    return isinstance(key, int) or (isinstance(key, Tensor) and not key.dim() and not _is_mask(key))
