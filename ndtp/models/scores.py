"""Scores of hidden states that are split: a router's, a gate's; few numbers a row, which every rank gets whole."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.models.frame import Passage
from ndtp.ops.products import relayout
from ndtp.ops.reductions import used_over


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
