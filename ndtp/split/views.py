"""Reshapes, transposes and slices: which dims of the result are those of the tensor, told by their strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.split.copies import as_view, in_form, share_memory, standing_for, with_strides_of
from ndtp.split.moving import moved
from ndtp.split.repeated import repeating
from ndtp.split.spec import Axes, Spec, layout_of
from ndtp.split.tensor import SplitTensor, dims_given, enter, getters, leave, like, rule, split_in

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
def view(func: TorchFunction, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A view whose arguments name dims and places in dims that are whole."""
    if not isinstance(x, SplitTensor) or split_in([*args, *kwargs.values()]):
        return NotImplemented
    if x.spec.sections:
        parts = _sections(func, x, args, kwargs)
        if parts is not None:
            return parts
    bare = plain(x)
    made = func(bare, *args, **kwargs)
    outs = [made] if isinstance(made, Tensor) else list(made)
    where = [kept_dims(bare, out) for out in outs]
    lost = [dim for dim in x.spec.split_dims if any(kept[dim] is None for kept in where)]
    if x.spec.sections and any(kept[-1] != out.dim() - 1 for kept, out in zip(where, outs, strict=True)):
        lost.append(len(x.spec.sizes) - 1)
    if lost:
        return view(func, standing_for(x, without(x, lost)), *args, **kwargs)
    specs = [with_dims_at(x.spec, out.shape, kept) for out, kept in zip(outs, where, strict=True)]
    try:
        result = func(leave(x), *args, **kwargs)
    except RuntimeError:
        if not x.spec.split_dims:
            raise
        result = None
    shards = [result] if isinstance(result, Tensor) else list(result or ())
    if [tuple(shard.shape) for shard in shards] != [spec.local for spec in specs]:  # arguments name all of a split dim
        return view(func, standing_for(x, without(x, x.spec.split_dims)), *args, **kwargs)
    dense = made if x.strides is None else func(like(x), *args, **kwargs)
    parts = [
        with_strides_of(enter(shard.view_as(shard), spec), strided)
        for shard, spec, strided in zip(shards, specs, [dense] if isinstance(made, Tensor) else dense, strict=True)
    ]
    return as_view(parts[0] if isinstance(made, Tensor) else type(made)(parts), x)


def plain(x: SplitTensor) -> Tensor:
    """A contiguous tensor without memory that has the sizes of the whole: its strides tell dims apart."""
    return torch.empty(x.spec.sizes, dtype=torch.bool, device="meta")


def _sections(func: TorchFunction, x: SplitTensor, args: Arguments, kwargs: Keywords) -> object:
    """The sections of a last dim, each with its own split; None where the function takes it apart otherwise."""
    spec = x.spec
    made = func(like(x), *args, **kwargs)
    if isinstance(made, Tensor) or not spec.sizes:
        return None
    last, lead = len(spec.sizes) - 1, spec.sizes[:-1]
    if any(tuple(part.shape[:-1]) != lead or not part.dim() for part in made):
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
    parts = [
        enter(
            shard.view_as(shard),
            replace(
                spec, sizes=(*lead, sum(group)), padded=(*spec.padded[:-1], sum(group)),
                sections=tuple(group) if len(group) > 1 else (),
            ),
        )
        for shard, group in zip(shards, grouped, strict=True)
    ]  # fmt: skip
    return as_view(type(made)(map(with_strides_of, parts, made)), x)


@rule(
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten,
    torch.ravel, Tensor.ravel, Tensor.view_as, Tensor.reshape_as, Tensor.squeeze, torch.squeeze,
)  # fmt: skip
def reshape(func: TorchFunction, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A dim that is split stays split where the cut falls on a multiple of the parts; else its axes are gathered."""
    if not isinstance(x, SplitTensor):
        if args and isinstance(args[0], SplitTensor):  # x.view_as(split)
            return func(x, like(args[0]))
        return NotImplemented
    args = tuple(like(y) if isinstance(y, SplitTensor) else y for y in args)
    if len(args) == 1 and isinstance(args[0], torch.dtype):
        return NotImplemented
    bare = like(x)
    try:
        made = func(bare, *args, **kwargs)
    except RuntimeError:
        if x.strides is None:
            raise
        bare = plain(x)  # strides of results are told from those of operands, and torch may choose others
        made = func(bare, *args, **kwargs)
    is_view = share_memory(made, bare)
    result: SplitTensor = _in_form(x, tuple(made.shape), is_view)
    return repeating(with_strides_of(result, made) if is_view else result, x)


@rule(Tensor.contiguous)
def contiguous(func: TorchFunction, x: Any, memory_format: object = torch.contiguous_format) -> Any:
    """The tensor itself if the dense one is contiguous, else a copy."""
    if memory_format is torch.contiguous_format and x.strides is None:
        return x
    return enter(leave(x).clone(memory_format=torch.contiguous_format), x.spec)


def _in_form(x: SplitTensor, sizes: tuple[int, ...], is_view: bool) -> Any:
    spec = x.spec

    def copied(less: SplitTensor) -> Any:
        """Return the view of a tensor for which dims were gathered."""
        return _in_form(standing_for(x, less) if is_view else less, sizes, is_view)

    if 0 in sizes:
        return enter(leave(without(x, spec.split_dims)).reshape(sizes), spec_whole(spec, sizes))
    given, axes, padded = list(spec.sizes), list(spec.dims), list(spec.padded)
    sections = spec.sections
    if sections and sizes and sizes[-1] == given[-1] and axes[-1]:
        pass  # the last dim stays as it is
    elif sections:
        count, each = len(sections), sections[0]
        if any(size != each for size in sections):
            return copied(without(x, [len(given) - 1]))
        given[-1:], axes[-1:], padded[-1:], sections = [count, each], [(), axes[-1]], [count, each], ()
    groups = _groups(given, sizes)
    if groups is None:
        return copied(without(x, spec.split_dims)) if spec.split_dims else NotImplemented
    out_axes: list[Axes] = []
    out_padded: list[int] = []
    for old, new in groups:
        made = _regrouped(
            spec, [given[d] for d in old], [axes[d] for d in old], [padded[d] for d in old], [sizes[d] for d in new]
        )
        if isinstance(made, int):  # the axes of this dim are in the way
            dim = min(old[made], len(spec.sizes) - 1)
            keep = spec.dims[dim][:-1] if not spec.sections else ()
            return copied(moved(x, [keep if d == dim else a for d, a in enumerate(spec.dims)]))
        out_axes += made[0]
        out_padded += made[1]
    target = replace(
        spec, sizes=sizes, layout=layout_of(spec.mesh, out_axes), padded=tuple(out_padded), sections=sections
    )
    return in_form(x, target, is_view)


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
        return split[-1]  # the minor ones are in the way
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


@rule(Tensor.expand, Tensor.expand_as, Tensor.broadcast_to, torch.broadcast_to)
def expand(func: TorchFunction, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, SplitTensor):
        return func(x, *[tuple(y.spec.sizes) if func is not Tensor.expand_as and isinstance(y, SplitTensor) else
                         like(y) if isinstance(y, SplitTensor) else y for y in args])  # fmt: skip
    args = tuple(like(y) if isinstance(y, SplitTensor) else y for y in args)
    sizes = tuple(func(like(x), *args, **kwargs).shape)
    offset = len(sizes) - len(x.spec.sizes)
    spec = with_dims_at(x.spec, sizes, [offset + dim for dim in range(len(x.spec.sizes))])
    made = enter(leave(x).expand(spec.local), spec)
    return as_view(with_strides_of(made, func(like(x), *args, **kwargs)), x)


@rule(torch.broadcast_tensors)
def broadcast(func: TorchFunction, *tensors: Tensor) -> list[Tensor]:
    sizes = torch.broadcast_shapes(*[x.shape for x in tensors])
    return [x.expand(sizes) for x in tensors]


@rule(Tensor.unsqueeze_, Tensor.transpose_, Tensor.t_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_)
def view_in_place(func: TorchFunction, x: Any, *args: Any, **kwargs: Any) -> object:
    """The tensor itself gets the dims of its view."""
    if func is Tensor.squeeze_:
        given = args[0] if args else kwargs.get("dim", range(len(x.spec.sizes)))
        asked = set(dims_given(given, len(x.spec.sizes)))
        gone = [d for d in asked if x.spec.sizes[d] == 1]
        made = reshape(torch.squeeze, x, tuple(gone)) if gone else x
        args, kwargs = (tuple(gone),), {}
    else:
        made = view(getattr(Tensor, func.__name__.removesuffix("_")), x, *args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        func(x, *args, **kwargs)
    x.spec, x.strides = made.spec, made.strides
    return x


@rule(torch.view_as_complex, torch.view_as_real, torch.real, torch.imag, *getters("real", "imag"))
def complex_view(func: TorchFunction, x: Any) -> object:
    """A view whose dims are those of the tensor, but for the one of pairs, which is whole."""
    if not isinstance(x, SplitTensor):
        return NotImplemented
    dense = func(like(x))
    last = len(x.spec.sizes) - 1
    is_pairs = func is torch.view_as_complex
    if x.spec.dims[last:] not in ((), ((),)) and (is_pairs or x.spec.sections):
        x = standing_for(x, without(x, [last]))
    where: list[int | None] = list(range(len(x.spec.sizes)))
    if is_pairs:
        where[last] = None
        if not leave(x).is_contiguous():
            x = standing_for(x, enter(leave(x).contiguous(), x.spec))
    shard = func(leave(x))
    made = enter(shard.view_as(shard), with_dims_at(x.spec, dense.shape, where))
    return as_view(with_strides_of(made, dense), x)
