"""The moves between layouts: gathers, slices and exchanges of split tensors, and cuts of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.steps import is_legal
from ndtp.compute.constants import constant_on, inverse_on, lasting
from ndtp.ops.reductions import reduce, relayout_plan
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.facts import is_strided
from ndtp.split.spec import Axes, Context, Spec, layout_of
from ndtp.split.tensor import NotStridedError, SplitTensor, enter, leave

NO_AXES: Axes = ()


def moved(
    x: SplitTensor, dims: Sequence[Axes], padded: Sequence[int] | None = None, used: Axes = (), kind: str = ""
) -> SplitTensor:
    """A split tensor with other axes at its dims; the tensor itself where it lies so already.

    Args:
        padded: the sizes with padding that the result shall have.  Default: those of x where a dim stays split, else
            the least that divide.
        used: axes along which each rank uses the result for something of its own, so that its gradient is summed.
        kind: of the tensor, as `ndtp.Wire` has them; "": it travels as it is computed.
    """
    dims, strides = tuple(dims), x.strides  # those of the dense tensor stay
    if x.spec.sections and dims[-1] != x.spec.dims[-1]:
        x = in_dense_order(x)
    spec = x.spec
    target = _target(spec, dims, padded)
    used = tuple(axis for axis in used if axis not in target.axes)
    if target == spec and not used:
        return x
    grid, shard = spec.mesh.grid, leave(x)
    # A dim whose padding changes, or whose axes come in another order, is gathered on the way.
    through = tuple(
        () if now and then and (size != wanted or not is_legal(grid, (now,), (then,))) else now
        for now, then, size, wanted in zip(spec.dims, dims, spec.padded, target.padded, strict=True)
    )
    if through != spec.dims:
        between = spec.lying(through)
        shard, spec = _relaid(shard, spec, between, (), kind), between
    made = enter(_relaid(_grown(shard, spec, target), spec, target, used, kind), target)
    made.strides = strides
    return made


def _target(spec: Spec, dims: Sequence[Axes], padded: Sequence[int] | None) -> Spec:
    if padded is None:
        made, grid = [], spec.mesh.grid
        for axes, then, was, size in zip(dims, spec.dims, spec.padded, spec.sizes, strict=True):
            count = grid.size(axes)
            made.append(size if not axes else was if then and was % count == 0 else -(-size // count) * count)
        padded = made
    return spec.lying(dims, padded)


def _grown(shard: Tensor, spec: Spec, target: Spec) -> Tensor:
    """Pad the end of dims that are whole now and split afterwards."""
    grow = [
        wanted - size if then and not now else 0
        for now, then, size, wanted in zip(spec.dims, target.dims, spec.padded, target.padded, strict=True)
    ]
    return F.pad(shard, [n for each in reversed(grow) for n in (0, each)]) if any(grow) else shard


def _relaid(shard: Tensor, spec: Spec, target: Spec, used: Axes, kind: str = "") -> Tensor:
    """Apply the collectives of a relayout, and cut off the padding of dims that are whole afterwards."""
    source, end = spec.layout, target.layout
    is_number = not shard.dim()
    if is_number:
        shard, source, end = shard.view(1), layout_of(spec.mesh, (NO_AXES,)), layout_of(spec.mesh, (NO_AXES,))
    in_order = spec.mesh.grid.nontrivial([axis for axis in spec.mesh.grid.names if axis in used])
    plan = relayout_plan(source, end, (), in_order, spec.origin or "activation", kind)
    given = shard
    shard = reduce(shard.contiguous(), plan, spec.mesh)
    if shard is given:
        shard = shard.view_as(shard)
    elif shard.untyped_storage()._cdata == given.untyped_storage()._cdata:
        shard = shard.clone()  # a view that an autograd.Function made may not be changed in place
    if is_number:
        return shard.view(())
    for dim, (axes, size) in enumerate(zip(target.dims, target.sizes, strict=True)):
        if not axes and shard.shape[dim] != size:
            shard = shard.narrow(dim, 0, size)
    return shard


def cut(x: Tensor, spec: Spec, used: Axes = ()) -> Tensor:
    """The shard of a tensor that is whole on every rank, as `spec` says; its gradient comes back whole.

    Raises:
        NotStridedError: the tensor is sparse or nested.
    """
    if not is_strided(x):
        raise NotStridedError
    x = x if is_plain(x) else x.full_tensor()  # type: ignore[attr-defined]  # a parameter outside of its layer
    if spec.sections:
        x = x.index_select(-1, constant_on(section_order(spec.sections, spec.layout.num_splits(-1)), x.device))
    bare = spec.lying([()] * len(spec.sizes), spec.sizes)
    if not x.requires_grad or not torch.is_grad_enabled():
        x = _grown(x, bare, spec)
        where = tuple(slice(part.start, part.stop) for part in map(spec.here, range(x.dim())))
        return x[where].clone() if x.dim() else x
    return _relaid(_grown(x, bare, spec), bare, spec, used)


def brought(
    x: Tensor, context: Context, dims: Sequence[Axes], padded: Sequence[int], used: Axes, name: str = "",
    kind: str = "", sections: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """The shard of an operand, split or whole, that lies with these axes at its dims.

    Args:
        sections: those that the last dim of a split operand may have.
    """
    if isinstance(x, SplitTensor):
        if x.spec.sections != sections and x.spec.sections and x.spec.dims[-1] == dims[-1]:
            x = in_dense_order(x)
        return leave(moved(x, dims, padded, used, kind))
    sizes = tuple(x.shape)
    spec = Spec(context, sizes, layout_of(context.mesh, tuple(dims)), tuple(padded), origin=name or "operand")
    return cut(x, spec, tuple(axis for axis in used if axis not in spec.axes))


@lru_cache(maxsize=1024)
def section_order(sections: tuple[int, ...], splits: int) -> Tensor:
    """Indices of a dim of several sections in the order in which ranks have them: each its part of each section."""
    order: list[int] = []
    for part in range(splits):
        start = 0
        for size in sections:
            order += range(start + part * size // splits, start + (part + 1) * size // splits)
            start += size
    with lasting():
        return torch.tensor(order, device="cpu")


def in_dense_order(x: SplitTensor) -> SplitTensor:
    """A tensor of several sections with its last dim whole, in the order of the dense one."""
    spec = x.spec
    splits = spec.layout.num_splits(-1)
    one = enter(leave(x), Spec(spec.context, spec.sizes, spec.layout, spec.padded, (), spec.origin))
    flat = moved(one, (*spec.dims[:-1], ()))
    order = inverse_on(section_order(spec.sections, splits), flat.device)
    return enter(leave(flat).index_select(-1, order), flat.spec)
