"""Norms, look-ups and losses under `torch.compile`: the same sums over axes, between operations that a compiler fuses.

Eagerly each is one node of autograd with a schedule of its own.  A graph has the arithmetic in the open, and what
moves as `ndtp.relayout`, whose gradients are relayouts again; so nothing is written twice but the formulas of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.compute import cross_entropy as one_rank
from ndtp.compute.norms import wide
from ndtp.ops.reductions import reduce
from ndtp.runtime.arrival import local_shard

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


def taken(parameter: Tensor, plan: RelayoutPlan, mesh: GridLike) -> Tensor:
    """See `ndtp.ops.moving.taken`; its gradient is reduced where it arises."""
    return local_shard(parameter) if plan.is_identity else reduce(local_shard(parameter), plan, mesh)


def norm(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    mesh: GridLike,
    *,
    layout: Layout,
    features: int,
    real: int,
    centred: bool,
    eps: float,
    name: str,
) -> Tensor:
    """See `ndtp.ops.norms.norm`; gain and bias are those that this rank uses.

    Args:
        layout: of the rows; they have so many `features`, of which this rank has `real`.
    """
    dtype, is_padded = wide(x.dtype), features != x.shape[1] * layout.num_splits(-1)
    kept = torch.arange(x.shape[1], device=x.device) < real
    without = lambda rows: torch.where(kept, rows, 0) if is_padded else rows  # noqa: E731
    rows = without(x.to(dtype))
    if centred:
        mean = _over_features(rows.sum(1), layout, mesh, name) / features
        rows = without(rows - mean[:, None])
    squares = _over_features(rows.square().sum(1), layout, mesh, name) / features
    y = rows * (squares + eps).rsqrt()[:, None]
    y = y if gain is None else y * gain
    y = y if bias is None else y + bias
    return without(y).to(x.dtype)


def _over_features(x: Tensor, layout: Layout, mesh: GridLike, name: str) -> Tensor:
    """Sum each row over all ranks that hold a part of it; each rank uses the sum for its own part."""
    axes = layout.grid.nontrivial(layout.dims[-1])
    rows = Layout(layout.grid, layout.dims[0])
    return reduce(x, RelayoutPlan(rows, rows, axes, axes, name), mesh) if axes else x


def check_rows(wrong: Tensor, what: str) -> None:
    """Check that ids are in range, on the device, because no value can be read while a graph is traced.

    Raises:
        RuntimeError: when the graph runs.
    """
    torch._assert_async(wrong == 0, what)


def row_losses(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    mesh: GridLike,
    *,
    layout: Layout,
    form: one_rank.LossForm,
    ignore_index: int,
    name: str,
) -> Tensor:
    """See `ndtp.ops.losses.row_losses`; of a row every rank's maximum is gathered, and two numbers are summed."""
    width, grid = logits.shape[1], layout.grid
    axes = grid.nontrivial(layout.dims[1])
    start = grid.index(mesh.rank, layout.dims[1]) * width
    real = min(max(form.classes - start, 0), width)
    column = torch.arange(width, device=logits.device)
    rows = torch.where(column < real, logits.to(wide(logits.dtype)), -torch.inf)
    local = targets - start
    own = (local[:, None] == column) & (column < real)
    counts = (targets != ignore_index) & (targets >= 0) & (targets < form.classes)
    top = rows.detach().amax(1)
    if axes:
        by_part = Layout(grid, layout.dims[0], axes), Layout(grid, layout.dims[0], None)
        top = reduce(top[:, None], RelayoutPlan(*by_part, name=name), mesh).amax(1)
    top = torch.where(top.isinf(), 0, top)
    labels = None
    share = own.to(rows.dtype) * (1 - form.smoothing)
    if weights is not None:
        weights = weights.detach().to(rows.dtype)
        _, labels = one_rank.row_weights(targets, form, weights)
        part = torch.nn.functional.pad(weights, (0, max(start + width - form.classes, 0)))[start : start + width]
        share = share * part
    else:
        part = (column < real).to(rows.dtype)
    if form.smoothing:
        share = share + form.smoothing / form.classes * part
    off = (torch.where(share > 0, rows, 0) * share).sum(1)
    exponentials, off = _summed((rows - top[:, None]).exp().sum(1), off, layout, name, mesh)
    return torch.where(counts, one_rank.losses(off, top + exponentials.log(), form, labels), 0)


def _summed(one: Tensor, other: Tensor, layout: Layout, name: str, mesh: GridLike) -> tuple[Tensor, Tensor]:
    """Sum over the ranks that hold a part of the classes; all of them continue with the same sums."""
    axes = layout.grid.nontrivial(layout.dims[1])
    if not axes:
        return one, other
    rows = Layout(layout.grid, None, layout.dims[0])
    both = reduce(torch.stack((one, other)), RelayoutPlan(rows, rows, axes, name=name), mesh)
    return both[0], both[1]
