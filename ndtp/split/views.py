"""Reshapes, transposes and slices: which dims of the result are those of the tensor, told by their strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ndtp.split.elementwise import aligned
from ndtp.split.moving import moved
from ndtp.split.spec import Axes, Spec, layout_of
from ndtp.split.tensor import SplitTensor, as_view, enter, getters, leave, like, refuse_lost, rule, split_in, written
from ndtp.split.whole import whole

VIEWS = [
    *getters("T", "mT", "H", "mH"),
    *[
        getattr(place, name)
        for place in (torch, Tensor)
        for name in (
            "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint", "unsqueeze",
            "select", "narrow", "unbind", "chunk", "split", "tensor_split", "diagonal", "hsplit", "vsplit", "dsplit",
            "split_with_sizes",
        )
        if hasattr(place, name)
    ],
    Tensor.unfold,
]  # fmt: skip


def kept_dims(x: Tensor, out: Tensor) -> list[int | None]:
    """Return, for each dim of x, the dim of its view `out` that is the whole of it, or None."""
    found: list[int | None] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        same = [d for d in range(out.dim()) if size > 1 and (out.shape[d], out.stride(d)) == (size, stride)]
        found.append(same[0] if len(same) == 1 else None)
    return found


def without(x: SplitTensor, lost: Sequence[int]) -> SplitTensor:
    """Return x with some dims whole."""
    return moved(x, [() if dim in lost else axes for dim, axes in enumerate(x.spec.dims)])


def with_dims_at(spec: Spec, sizes: Sequence[int], where: Sequence[int | None]) -> Spec:
    """The spec of a result whose dims `where[d]` are the dims d of `spec`, and whose other dims are whole."""
    dims: list[Axes] = [()] * len(sizes)
    padded = list(sizes)
    sections: tuple[int, ...] = ()
    for dim in spec.split_dims:
        out = where[dim]
        assert out is not None
        dims[out], padded[out] = spec.dims[dim], spec.padded[dim]
        if spec.sections and dim == len(spec.sizes) - 1 and out == len(sizes) - 1:
            sections = spec.sections
    return replace(spec, sizes=tuple(sizes), layout=layout_of(spec.mesh, dims), padded=tuple(padded), sections=sections)


@rule(*VIEWS)
def view(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A view whose arguments name dims and places in dims that are whole."""
    if not isinstance(x, SplitTensor) or split_in([*args, *kwargs.values()]):
        return NotImplemented
    if x.spec.sections:
        parts = _sections(func, x, args, kwargs)
        if parts is not None:
            return parts
    bare = like(x)
    made = func(bare, *args, **kwargs)
    outs = [made] if isinstance(made, Tensor) else list(made)
    where = [kept_dims(bare, out) for out in outs]
    lost = [dim for dim in x.spec.split_dims if any(kept[dim] is None for kept in where)]
    if x.spec.sections and any(kept[-1] != out.dim() - 1 for kept, out in zip(where, outs, strict=True)):
        lost.append(len(x.spec.sizes) - 1)
    if lost:
        less = without(x, lost)
        return as_view(view(func, less, *args, **kwargs), x, less)
    result = func(leave(x), *args, **kwargs)
    if isinstance(made, Tensor):
        return as_view(enter(result.view_as(result), with_dims_at(x.spec, made.shape, where[0])), x, x)
    parts = [
        enter(part.view_as(part), with_dims_at(x.spec, out.shape, kept))
        for part, out, kept in zip(result, outs, where, strict=True)
    ]
    return as_view(type(made)(parts), x, x)


def _sections(func: Any, x: SplitTensor, args: Any, kwargs: Any) -> Any:
    """The sections of a last dim, each with its own split; None where the function takes it apart otherwise."""
    spec = x.spec
    bare = like(x)
    made = func(bare, *args, **kwargs)
    if isinstance(made, Tensor) or bare.dim() == 0:
        return None
    last, lead = len(spec.sizes) - 1, spec.sizes[:-1]
    if any(tuple(part.shape[:-1]) != lead for part in made):
        return None
    sizes, rest, grouped = [part.shape[-1] for part in made], list(spec.sections), []
    for size in sizes:  # each part is one section or several
        group: list[int] = []
        while rest and sum(group) < size:
            group.append(rest.pop(0))
        if sum(group) != size:
            return None
        grouped.append(group)
    splits = spec.layout.num_splits(-1)
    shards = leave(x).split([sum(group) // splits for group in grouped], dim=last)
    return type(made)(
        enter(
            shard.contiguous(),
            replace(
                spec, sizes=(*lead, sum(group)), padded=(*spec.padded[:-1], sum(group)),
                sections=tuple(group) if len(group) > 1 else (),
            ),
        )
        for shard, group in zip(shards, grouped, strict=True)
    )  # fmt: skip


@rule(Tensor.squeeze, torch.squeeze)
def squeeze(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    made = func(like(x), *args, **kwargs)
    return _reshaped(x, tuple(made.shape))


@rule(
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten,
    torch.ravel, Tensor.ravel, Tensor.view_as, Tensor.reshape_as,
)  # fmt: skip
def reshape(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A dim that is split stays split where the cut falls on a multiple of the parts; else its axes are gathered."""
    if not isinstance(x, SplitTensor):
        if args and isinstance(args[0], SplitTensor):  # x.view_as(split)
            return func(x, like(args[0]))
        return NotImplemented
    args = tuple(like(y) if isinstance(y, SplitTensor) else y for y in args)
    if len(args) == 1 and isinstance(args[0], torch.dtype):
        return NotImplemented
    made = func(like(x), *args, **kwargs)
    return _reshaped(x, tuple(made.shape))


def _reshaped(x: SplitTensor, sizes: tuple[int, ...]) -> SplitTensor:
    made: SplitTensor = _in_form(x, sizes)
    # Of a tensor that torch can only copy into this form, what is written is lost in the dense model, too.
    made.is_copy = made.is_copy or x.is_copy
    return made


def _in_form(x: SplitTensor, sizes: tuple[int, ...]) -> Any:
    spec = x.spec
    if 0 in sizes:
        return enter(leave(without(x, spec.split_dims)).reshape(sizes), spec_whole(spec, sizes))
    given, axes, padded = list(spec.sizes), list(spec.dims), list(spec.padded)
    sections = spec.sections
    if sections and sizes and sizes[-1] == given[-1] and axes[-1]:
        pass  # the last dim stays as it is
    elif sections:
        count, each = len(sections), sections[0]
        if any(size != each for size in sections):
            return _copied(without(x, [len(given) - 1]), sizes)
        given[-1:], axes[-1:], padded[-1:], sections = [count, each], [(), axes[-1]], [count, each], ()
    groups = _groups(given, sizes)
    if groups is None:
        return _copied(without(x, spec.split_dims), sizes) if spec.split_dims else NotImplemented
    out_axes: list[Axes] = []
    out_padded: list[int] = []
    for old, new in groups:
        made = _regrouped(
            spec, [given[d] for d in old], [axes[d] for d in old], [padded[d] for d in old], [sizes[d] for d in new]
        )
        if isinstance(made, int):  # the axes of this dim are in the way
            dim = min(old[made], len(spec.sizes) - 1)
            keep = spec.dims[dim][:-1] if not spec.sections else ()
            return _copied(moved(x, [keep if d == dim else a for d, a in enumerate(spec.dims)]), sizes)
        out_axes += made[0]
        out_padded += made[1]
    target = replace(
        spec, sizes=sizes, layout=layout_of(spec.mesh, out_axes), padded=tuple(out_padded), sections=sections
    )
    return enter(leave(x).reshape(target.local), target)


def _copied(less: SplitTensor, sizes: tuple[int, ...]) -> SplitTensor:
    """The form of a tensor for which dims were gathered."""
    less.is_copy = True
    return _reshaped(less, sizes)


def spec_whole(spec: Spec, sizes: Sequence[int]) -> Spec:
    return replace(
        spec, sizes=tuple(sizes), layout=layout_of(spec.mesh, [()] * len(sizes)), padded=tuple(sizes), sections=()
    )


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """The least groups of consecutive dims, before and after, that hold the same elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        mine, theirs = [], []
        a = b = 1
        if i < len(old):
            mine, a, i = [i], old[i], i + 1
        if j < len(new):
            theirs, b, j = [j], new[j], j + 1
        while a != b:
            if a < b and i < len(old):
                mine.append(i)
                a, i = a * old[i], i + 1
            elif b < a and j < len(new):
                theirs.append(j)
                b, j = b * new[j], j + 1
            else:
                return None
        if a == 1 and groups and (i >= len(old) or j >= len(new)):  # ones at the end
            groups[-1][0].extend(mine)
            groups[-1][1].extend(theirs)
            continue
        groups.append((mine, theirs))
    return groups


def _regrouped(
    spec: Spec, old: Sequence[int], axes: Sequence[Axes], padded: Sequence[int], new: Sequence[int]
) -> tuple[list[Axes], list[int]] | int:
    """Axes and padded sizes of the dims of one group afterwards; or which of the dims before has axes in the way."""
    split = [d for d, names in enumerate(axes) if names]
    if not split:
        return [()] * len(new), list(new)
    if len(old) == len(new) == 1:
        return [axes[0]], [padded[0]]
    first = next((d for d, size in enumerate(old) if size > 1), 0)
    if len(split) > 1:
        return _of_several(spec, old, axes, padded, new)
    d = split[0]
    if d != first:
        return d
    splits = spec.mesh.grid.size(axes[d])
    rest_old = math.prod(old[d + 1 :])
    target = next((k for k, size in enumerate(new) if size > 1), 0)
    rest_new = math.prod(new[target + 1 :])
    total = padded[d] * rest_old  # elements with the padding behind them
    if total % rest_new or (total // rest_new) % splits:
        return d
    out_axes: list[Axes] = [()] * len(new)
    out_padded = list(new)
    out_axes[target], out_padded[target] = axes[d], total // rest_new
    return out_axes, out_padded


def _of_several(
    spec: Spec, old: Sequence[int], axes: Sequence[Axes], padded: Sequence[int], new: Sequence[int]
) -> tuple[list[Axes], list[int]] | int:
    """Return the split of a group in which more than one dim is split, where the minor ones are in the way."""
    return max(d for d, names in enumerate(axes) if names)


@rule(Tensor.expand, Tensor.expand_as, Tensor.broadcast_to, torch.broadcast_to)
def expand(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, SplitTensor):
        return func(x, *[tuple(y.spec.sizes) if func is not Tensor.expand_as and isinstance(y, SplitTensor) else
                         like(y) if isinstance(y, SplitTensor) else y for y in args])  # fmt: skip
    args = tuple(like(y) if isinstance(y, SplitTensor) else y for y in args)
    sizes = tuple(func(like(x), *args, **kwargs).shape)
    offset = len(sizes) - len(x.spec.sizes)
    spec = with_dims_at(x.spec, sizes, [offset + dim for dim in range(len(x.spec.sizes))])
    return as_view(enter(leave(x).expand(spec.local), spec), x, x)


@rule(Tensor.__getitem__)
def item(func: Any, x: Any, key: Any) -> Any:
    """Slices and picks of dims that are whole; a dim that is picked from is gathered, and no other."""
    if not isinstance(x, SplitTensor):
        return NotImplemented
    keys = _spelt_out(key, len(x.spec.sizes))
    if any(isinstance(k, Tensor) for k in keys) or any(isinstance(k, bool) for k in keys):
        return _picked(func, x, keys)
    made = view(func, x, tuple(keys))
    if isinstance(made, SplitTensor) and made.is_copy and (not x.is_copy or x.source is not None):
        made.source = (x, tuple(keys))
    return made


def _spelt_out(key: Any, count: int) -> list[Any]:
    """One key a dim of the tensor or of the result; lists are tensors, and an ellipsis is slices."""
    keys = [whole(k) if isinstance(k, Tensor) else torch.as_tensor(k) if isinstance(k, (list, range)) else k
            for k in (key if isinstance(key, tuple) else [key])]  # fmt: skip
    used = sum(k.dim() if isinstance(k, Tensor) and k.dtype in (torch.bool, torch.uint8) else 1
               for k in keys if k is not None and k is not Ellipsis)  # fmt: skip
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (count - used)
    return keys


@rule(Tensor.__setitem__)
def set_item(func: Any, x: Any, key: Any, value: Any) -> Any:
    """Write into places of dims that are whole; each rank writes into its part of the other dims."""
    if not isinstance(x, SplitTensor) or (isinstance(value, Tensor) and value.dim() > len(x.spec.sizes)):
        return NotImplemented
    refuse_lost(x, "setitem")
    keys = _spelt_out(key, len(x.spec.sizes))
    with torch.no_grad():
        part = item(Tensor.__getitem__, x, tuple(keys))
    if x.spec.sections or (part.spec.axes if isinstance(part, SplitTensor) else ()) != x.spec.axes:
        return NotImplemented
    if isinstance(value, Tensor) and (value.dim() or value.requires_grad):
        spec = part.spec
        value = aligned(value, spec.context, spec.dims, spec.padded, spec.sizes)
    leave(x)[tuple(keys)] = value
    written(x)
    return None


def _picked(func: Any, x: SplitTensor, keys: Sequence[Any]) -> Any:
    """Pick by whole tensors of indices; torch puts the result where the first index stands, or in front."""
    if any(isinstance(k, bool) for k in keys):
        return NotImplemented
    dim, plain, advanced = 0, [], []
    for place, k in enumerate(keys):
        if k is None:
            continue
        count = k.dim() if isinstance(k, Tensor) and k.dtype in (torch.bool, torch.uint8) else 1
        if isinstance(k, slice) and k.indices(x.spec.sizes[dim]) == (0, x.spec.sizes[dim], 1):
            plain.append((place, dim))
        elif isinstance(k, (Tensor, int)):
            advanced.append(place)
        dim += count
    stay = {d for _, d in plain}
    lost = [d for d in x.spec.split_dims if d not in stay]
    if lost:
        x = without(x, lost)
    shard = leave(x)
    result = func(shard, tuple(keys))
    # Which dim of the result is each of those that stay: dims of a trial whose sizes tell.
    together = advanced == list(range(advanced[0], advanced[-1] + 1))
    tensors = [k for k in keys if isinstance(k, Tensor)]
    count = max([k.dim() for k in tensors if k.dtype not in (torch.bool, torch.uint8)]
                + [1 for k in tensors if k.dtype in (torch.bool, torch.uint8)])  # fmt: skip
    where: list[int | None] = [None] * len(x.spec.sizes)
    out = 0 if together else count
    for place in range(len(keys)):
        if together and place == advanced[0]:
            out += count
        if place in advanced:
            continue
        match = next((d for p, d in plain if p == place), None)
        if match is not None:
            where[match] = out
        out += 1
    sizes = list(result.shape)
    for d, o in enumerate(where):
        if o is not None:
            sizes[o] = x.spec.sizes[d]
    return enter(result.view_as(result), with_dims_at(x.spec, sizes, where))


@rule(Tensor.unsqueeze_, Tensor.transpose_, Tensor.t_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_)
def view_in_place(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensor itself gets the dims of its view."""
    if func is Tensor.squeeze_:
        given = args[0] if args else kwargs.get("dim", range(len(x.spec.sizes)))
        asked = {d % len(x.spec.sizes) for d in ([given] if isinstance(given, int) else given)}
        gone = [d for d in asked if x.spec.sizes[d] == 1]
        spec = squeeze(torch.squeeze, x, tuple(gone)).spec if gone else x.spec
        args, kwargs = (tuple(gone),), {}
    else:
        plain = getattr(Tensor, func.__name__.removesuffix("_"))
        spec = view(plain, x, *args, **kwargs).spec
    with torch._C.DisableTorchFunctionSubclass():
        func(x, *args, **kwargs)
    x.spec = spec
    return x
