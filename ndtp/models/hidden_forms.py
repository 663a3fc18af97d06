"""Functions that act on shards of hidden states: reshapes, parts, picked rows, a few features, the loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.compute.torch_calls import TorchFunction
from ndtp.models.frame import Passage
from ndtp.models.hidden import FORMS, PARTS, RESHAPES, Hidden, alias, brought, enter, leave, like
from ndtp.models.hidden_views import (
    Expanded,
    Feature,
    PartOfFeatures,
    PickedRows,
    expanded,
    joined,
    rows_picked,
    standing_for,
)
from ndtp.models.rows import are_all, is_view, picked_rows
from ndtp.nn.losses import cross_entropy
from ndtp.ops.losses import dtype_of_loss
from ndtp.ops.products import relayout
from ndtp.ops.reductions import used_over
from ndtp.runtime.arrival import is_plain, plain_of
from ndtp.split.copies import share_memory, version_of
from ndtp.split.gathered_operands import counted
from ndtp.split.hooked_gradients import edge_of
from ndtp.split.whole_views import entered


def _reshape(func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> object:
    """Reshape leading dims, where rows stay on their ranks."""
    if not isinstance(x, Hidden):
        return NotImplemented
    dense = like(x)
    made = func(dense, *args, **kwargs)
    shape = tuple(made.shape)
    if not shape or shape[-1] != x.passage.features or len(shape) < 2:
        return NotImplemented
    passage = replace(x.passage, lead=shape[:-1])
    if x.strides is None:
        return alias(leave(x), passage, x)
    if not share_memory(made, dense):
        return enter(leave(x).clone(), passage)
    return alias(leave(x), passage, x, made.stride())


def _parts(func: TorchFunction, x: Tensor, size: Any, dim: int = 0) -> Any:
    """Split features into parts, where each part is split over ranks by itself."""
    if not isinstance(x, Hidden) or dim not in (-1, x.dim() - 1) or x.passage.sections == 1:
        return NotImplemented
    passage = x.passage
    count, each = passage.sections, passage.features // passage.sections
    whole = func(torch.empty(passage.shape, device="meta"), size, dim)
    if [tuple(part.shape) for part in whole] != [(*passage.lead, each)] * count:
        return NotImplemented
    part = replace(passage, features=each, width=passage.width // count, sections=1)
    strides = whole[0].stride()
    return tuple(_part(x, shard, part, strides, i) for i, shard in enumerate(leave(x).chunk(count, dim=1)))


def _part(x: Hidden, shard: Tensor, part: Passage, strides: tuple[int, ...], place: int) -> Hidden:
    if shard.is_contiguous():
        return alias(shard, part, x, strides)
    return standing_for(PartOfFeatures(x, shard.contiguous(), version_of(x), place), part, strides)


def _picked(x: Tensor, key: Any) -> Any:
    """Rows of the leading dims, `x[:, 0]`, `x[:, -1:, :]`: each rank gives those that it has."""
    if not isinstance(x, Hidden) or x.passage.sections > 1:
        return NotImplemented
    passage, frame = x.passage, x.passage.frame
    ids = picked_rows(passage, key)
    if ids is None:
        return _feature(x, key)
    if are_all(ids, passage):
        return alias(leave(x), passage, x, x.strides)
    lead = tuple(ids.shape)
    rows, across = frame.rows_of(lead)
    target = replace(passage, lead=lead, rows=rows, across=across)
    shard = rows_picked(leave(x), ids, passage, target)
    if not is_view(key):
        return enter(shard.view_as(shard), target)
    strides = None if ids.is_contiguous() and x.strides is None else like(x)[key].stride()
    return standing_for(PickedRows(x, shard, version_of(x), ids, target), target, strides)


def _set_item(x: Tensor, key: object, value: object) -> object:
    """`x[:, 0] += 1`: what is written to the rows that were picked has come to x, and is not to be put there again."""
    link = value.link if isinstance(value, Hidden) else None
    if not isinstance(x, Hidden) or not isinstance(link, PickedRows) or link.base is not x:
        return NotImplemented
    ids = picked_rows(x.passage, key)
    is_same = ids is not None and ids.shape == link.ids.shape and torch.equal(ids, link.ids)
    return None if is_same else NotImplemented


def _expanded(x: Tensor, *sizes: object) -> object:
    if not isinstance(x, Hidden) or (found := expanded(leave(x), x.passage, *sizes)) is None:
        return NotImplemented
    shard, passage = found
    if passage == x.passage:
        return alias(leave(x), passage, x, x.strides)
    return standing_for(Expanded(x, shard, version_of(x), sizes), passage)  # type: ignore[arg-type]


def _joined(parts: Sequence[Tensor], dim: int = 0) -> object:
    found = joined(parts, dim, brought)
    return NotImplemented if found is None else enter(*found)


def _feature(x: Hidden, key: object) -> object:
    """`x[..., -1]`, one feature of all rows, on every rank: of its number no more is moved than of a row's."""
    passage, frame = x.passage, x.passage.frame
    *lead, last = key if isinstance(key, tuple) else (key,)
    is_all = lead == [Ellipsis] or (len(lead) == len(passage.lead) and all(k == slice(None) for k in lead))
    if not is_all or type(last) is not int or not -passage.features <= last < passage.features:
        return NotImplemented
    mesh, outside, axes = frame.mesh, frame.outside, passage.layout.dims[1]
    count = passage.width // passage.layout.num_splits(1)
    at = last % passage.features - mesh.grid.index(mesh.rank, axes) * count
    mine = leave(x)[:, at : at + 1] if 0 <= at < count else leave(x)[:, :1] * 0
    held = Layout(mesh.grid, passage.layout.dims[0], None)
    column = relayout(mine, held, outside, mesh, f"{passage.came_from} feature", partial=mesh.grid.nontrivial(axes))
    made = passage.in_order(column)[:, 0].reshape(passage.lead)
    made = counted(torch.stack([made, made], -1))[..., 0]  # not contiguous, as the dense one
    return entered(made.view_as(made), Feature(x, made, version_of(x), key))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply by a weight that is whole on every rank and leads to few features."""
    is_one = isinstance(x, Hidden) and not isinstance(weight, Hidden) and x.passage.sections == 1
    if not is_one or weight.dim() != 2 or 2 * weight.shape[0] > weight.shape[1]:  # the sum takes twice its size
        return NotImplemented
    own, own_bias = (p if p is None or is_plain(p) else plain_of(p) for p in (weight, bias))  # of layers that came late
    return scores(leave(x), own, own_bias, x.passage)  # type: ignore[attr-defined, arg-type]


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> object:
    """Compute the cross entropy of logits that stay split."""
    if not isinstance(logits, Hidden) or size_average is not None or reduce is not None:
        return NotImplemented
    passage = logits.passage
    frame = passage.frame
    if logits.dim() != 2 or target.is_floating_point() or target.numel() != passage.lead[0]:
        return NotImplemented
    padded = passage.laid(target, ignore_index)
    here = passage.rows_here
    loss = cross_entropy(
        leave(logits), padded[here.start : here.stop], layout=passage.layout, mesh=frame.mesh,
        classes=passage.features, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction=reduction, name=passage.came_from or "loss",
    ).to(dtype_of_loss(logits.dtype, target.device.type))  # fmt: skip
    if reduction != "none":
        found = frame.mesh.step.made_whole(loss, (target, weight, ignore_index, label_smoothing, reduction))
        return frame.note_loss(found)
    rows = Layout(frame.mesh.grid, passage.layout.dims[0], None)
    return passage.in_order(relayout(loss[:, None], rows, frame.outside, frame.mesh, "losses"))[:, 0]


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Run backward with gradients of shards, as autograd hands them to a checkpoint."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or ())
    with torch._C.DisableTorchFunctionSubclass():
        if len(grads) != len(given) or any(g is None or g.shape != x.shape for x, g in zip(given, grads, strict=True)):
            return NotImplemented
        shards = [g.as_subclass(Tensor) for g in grads]  # their sizes are those that an edge has
    return torch.autograd.backward([*map(edge_of, given)], shards, *args, **kwargs)


OWN: dict[Any, Any] = {
    **{func: lambda *a, _f=func, **k: _reshape(_f, *a, **k) for func in RESHAPES},
    **{func: partial(_parts, func) for func in PARTS},
    Tensor.__getitem__: _picked,
    Tensor.__setitem__: _set_item,
    Tensor.expand: _expanded,
    torch.cat: _joined,
    F.cross_entropy: _cross_entropy,
    F.linear: _linear,
    torch.autograd.backward: _backward,
    Tensor.__repr__: lambda x, **_: f"Hidden(from '{x.passage.came_from}', {x.passage})",
    Tensor.__format__: lambda x, *_: f"Hidden(from '{x.passage.came_from}', {x.passage})",
}
FORMS.update(OWN)


def scores(shard: Tensor, weight: Tensor, bias: Tensor | None, passage: Passage) -> Tensor:
    """`x W^T + b` [.., scores] on every rank (of its dp rows), of the activation x of which `shard` is this rank's.

    Each rank multiplies what it has of rows and features, in fp32 at least, autocast or not; what these sum up to is
    gathered, instead of the activation.

    Args:
        weight, bias: whole on every rank, [scores, features] and [scores].
    """
    frame, layout = passage.frame, passage.layout
    mesh, name = frame.mesh, f"{passage.came_from} scores"
    inner = layout.dims[0][len(frame.outside.dims[0]) :]
    bare, by_feature = Layout(mesh.grid, None, None), Layout(mesh.grid, None, layout.dims[1])
    device, dtype = shard.device.type, torch.result_type(shard, weight)
    is_cast = not shard.is_meta and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else dtype
    with nullcontext() if shard.is_meta else torch.autocast(device, enabled=False):
        wide = torch.promote_types(dtype, torch.float32)
        mine = relayout(F.pad(weight, (0, passage.width - passage.features)), bare, by_feature, mesh, name)
        mine = used_over(mine, by_feature, inner, mesh, name)
        part = shard.to(wide) @ mine.to(wide).t()
        held = Layout(mesh.grid, layout.dims[0], None)
        y = relayout(part, held, frame.outside, mesh, name, partial=layout.dims[1])
        y = passage.in_order(y).reshape(*passage.lead, -1)
        return (y if bias is None else y + bias).to(dtype)
