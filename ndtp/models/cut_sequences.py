"""Attention of sequences that are split over ranks: its code gets split tensors, [batch, sequence, features].

Where the batch does not divide, a rank has tokens of every sequence instead of whole sequences.  The projections of an
attention module then hand out tensors with the sizes of all tokens (of this rank's heads), and the table of
`ndtp.split` does with them what the module's code says: what goes token by token stays split, and attention itself
brings together the keys and values that its queries look at.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.models.frame import Frame, Passage
from ndtp.models.hidden import Hidden, split, whole
from ndtp.split.moving import brought
from ndtp.split.spec import Axes, Context, Spec, layout_of
from ndtp.split.tensor import SplitTensor, enter


def context_of(frame: Frame) -> Context:
    """Return what split tensors inside of a model's attention share."""
    shared = (frame.outside.dims[0], frame.sequences, frame.gathered)
    return Context(frame.mesh, *shared, attention=frame.attention)


def row_axes(frame: Frame, layout: Layout) -> Axes:
    """Return the axes that split the rows of one dp rank."""
    return frame.mesh.grid.nontrivial(layout.dims[0][len(frame.outside.dims[0]) :])


def in_sequences(x: Hidden, name: str) -> Hidden:
    """Return hidden states [batch, sequence, features] whose rows lie as those of an embedding do."""
    passage = x.passage
    frame = passage.frame
    if (passage.rows, passage.across) == frame.rows_of(passage.lead):
        return x
    frame.note(f"'{name}', which takes sequences,", passage)
    return split(whole(x), frame, passage.layout, passage.width, passage.came_from)


def of_tokens(rows: Tensor, passage: Passage, inner: Layout, context: Context, name: str) -> Tensor:
    """Return this rank's rows [rows, features] as [batch, sequence, features] with the sizes of all tokens."""
    (batch, length), axes = passage.lead, row_axes(passage.frame, inner)
    y = rows.unflatten(0, (-1, batch)).transpose(0, 1)
    if not axes:
        return y[:, :length].contiguous()
    sizes = (batch, length, y.shape[2])
    layout = layout_of(passage.frame.mesh, [(), axes, ()])
    return enter(y.contiguous(), Spec(context, sizes, layout, (batch, passage.rows // batch, y.shape[2]), (), name))


def as_rows(x: Tensor, passage: Passage, inner: Layout, context: Context) -> Tensor:
    """Return [batch, sequence, ..] as this rank's rows, [rows, features]."""
    (batch, length), axes = passage.lead, row_axes(passage.frame, inner)
    x = x.reshape(batch, length, -1)
    padded = passage.rows // batch
    if axes or isinstance(x, SplitTensor):
        x = brought(x, context, [(), axes, ()], [batch, padded if axes else length, x.shape[2]], ())
    if not axes:
        x = F.pad(x, (0, 0, 0, padded - length))
    return x.transpose(0, 1).flatten(0, 1)


def with_all_heads(x: SplitTensor, heads: int, axes: Axes, name: str) -> SplitTensor:
    """Return what an attention module gives of this rank's heads, [batch, heads, ..], with the sizes of all heads."""
    spec = x.spec
    dims = [axes if dim == 1 else own for dim, own in enumerate(spec.dims)]
    change = lambda sizes: (sizes[0], heads, *sizes[2:])  # noqa: E731
    made = Spec(spec.context, change(spec.sizes), layout_of(spec.mesh, dims), change(spec.padded), (), name)
    with_sizes = x.view_as(x)
    return enter(with_sizes, made)
