"""Cross entropy of logits whose classes are split: nothing is gathered but a few numbers a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.cached import cached_property
from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import MergePlan, RelayoutPlan
from ndtp.collectives.streams import has_streams
from ndtp.compute import cross_entropy as one_rank
from ndtp.compute.cross_entropy import LossForm
from ndtp.compute.norms import wide
from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import is_autocast_on
from ndtp.errors import LayoutError, RangeError
from ndtp.ops import compiled_layers
from ndtp.ops.moving import enter, moved
from ndtp.ops.reductions import merged, reduce, relayout_plan

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike

TOTAL_BYTES = 8  # of a number of the totals


@dataclass(frozen=True)
class LossPlan:
    """The plan of a cross entropy.

    Args:
        layout: of the logits, [M, V].
        form: what is computed of a row; its classes are those without padding, which stands behind them.
        ignore_index: the target of rows that do not count.
        name: what errors and profiles call it.
    """

    layout: Layout
    form: LossForm
    ignore_index: int = -100
    name: str = "loss"

    @cached_property
    def merge(self) -> MergePlan:
        return MergePlan(self.layout.grid, self.layout.dims[1], one_rank.NUMBERS, one_rank.MERGED)

    @cached_property
    def rows(self) -> Layout:
        """The layout of one number for each row."""
        return Layout(self.layout.grid, self.layout.dims[0])

    @cached_property
    def totals(self) -> RelayoutPlan:
        """The steps that sum over rows: [the losses, how many rows count, how many targets are wrong]."""
        whole = Layout(self.layout.grid, None)
        return RelayoutPlan(whole, whole, self.layout.grid.nontrivial(self.layout.dims[0]), name=self.name)


def checked_targets(targets: Tensor, rows: int, splits: int, name: str) -> tuple[Tensor, bool]:
    """Targets of this rank's rows, or of all: as one dim, and whether they are all.

    Raises:
        LayoutError: another number of targets.
    """
    targets, whole = targets.flatten(), rows * splits
    if targets.is_floating_point() or targets.numel() not in (rows, whole):
        raise LayoutError(
            f"cross_entropy '{name}': {targets.numel()} targets of {targets.dtype} for {rows} rows on this rank, "
            f"{whole} in all; give whole numbers, for the one or the other"
        )
    return targets, targets.numel() == whole


def row_losses(
    logits: Tensor, targets: Tensor, plan: LossPlan, mesh: GridLike, weights: Tensor | None = None
) -> Tensor:
    """The loss of each of this rank's rows, on every rank that has a part of its classes; zero where it is ignored.

        logits   [M / (z x), V / y]     this rank's shard of L[M_zx, V_y]
        targets  [M / (z x)]            classes of the whole; those that are none count as ignored
        weights  [V]                    of all classes
        returns  [M / (z x)]            fp32 at least

        forward  the maximum, the sum of exponentials and the target's logit of a row, merged over y

    Backward needs nothing of the others: a rank has all it takes for the gradient of its logits.
    """
    if torch.compiler.is_compiling():
        return compiled_layers.row_losses(
            logits, targets, weights, mesh, layout=plan.layout, form=plan.form, ignore_index=plan.ignore_index,
            name=plan.name,
        )  # fmt: skip
    loss: Tensor = _RowLosses.apply(logits, targets, plan, mesh, weights)  # type: ignore[no-untyped-call]
    return loss


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, targets: Tensor, plan: LossPlan, mesh: GridLike, weights: Tensor | None
    ) -> Tensor:
        form, width = plan.form, logits.shape[1]
        start = mesh.grid.index(mesh.rank, plan.layout.dims[1]) * width
        real = min(max(form.classes - start, 0), width)
        local = targets - start
        local = torch.where((local >= 0) & (local < real), local, -1)
        counts = (targets != plan.ignore_index) & (targets >= 0) & (targets < form.classes)
        labels = part = None
        if weights is not None:
            weights = weights.detach().to(wide(logits.dtype))
            (_, labels), part = one_rank.row_weights(targets, form, weights), weights[start : start + real]
        found = one_rank.statistics(logits[:, :real], local, form, part)
        off, lse = merged(found, plan.merge, one_rank.merged, mesh, plan.name).unbind()
        ctx.save_for_backward(logits, local, lse, counts, labels, part)
        ctx.plan, ctx.mesh, ctx.real = plan, mesh, real
        return torch.where(counts, one_rank.losses(off, lse, form, labels), 0)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, lse, counts, labels, part = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            again = _differentiable(logits[:, : ctx.real], local, lse, ctx.plan, ctx.mesh, labels, part)
            found = torch.autograd.grad(torch.where(counts, again, 0), logits, grad, create_graph=True)
            return *found, None, None, None, None
        upstream = torch.where(counts, grad, 0).to(lse.dtype)
        found = one_rank.gradient(logits[:, : ctx.real], local, lse, upstream, ctx.plan.form, labels, part)
        return F.pad(found, (0, logits.shape[1] - ctx.real)), None, None, None, None


def _differentiable(
    logits: Tensor, local: Tensor, lse: Tensor, plan: LossPlan, mesh: GridLike, labels: Any, part: Any
) -> Tensor:
    """The losses of rows by operations and sums that autograd can differentiate as often as wanted.

    Args:
        lse: the log of the sum of exponentials of each row, which keeps those here in range.
    """
    axes, lse = plan.merge.axes, torch.where(lse.isinf(), 0, lse)
    values = logits.to(lse.dtype)
    off = one_rank.statistics(values, local, plan.form, part)[2]
    both = torch.stack(((values - lse[:, None]).exp().sum(1), off), 1)
    rows = Layout(plan.layout.grid, plan.layout.dims[0], None)
    exponentials, off = reduce(both, relayout_plan(rows, rows, axes, (), plan.name), mesh).unbind(1)
    return one_rank.losses(off, lse + exponentials.log(), plan.form, labels)


def cross_entropy(
    logits: Tensor, targets: Tensor, plan: LossPlan, mesh: GridLike, reduction: str, weights: Tensor | None = None
) -> Tensor:
    """The cross entropy of logits that are split over rows and classes; see `ndtp.nn.cross_entropy`."""
    if logits.dim() != 2:
        raise LayoutError(f"cross_entropy '{plan.name}': logits are {tuple(logits.shape)}; they are [rows, classes]")
    check_weights(weights, plan)
    enter(mesh, (plan, reduction), logits)
    rows, are_all = checked_targets(targets, logits.shape[0], plan.rows.num_splits(0), plan.name)
    rows = plan.rows.shard(rows, mesh.rank) if are_all else rows
    losses = row_losses(logits, rows, plan, mesh, weights)
    total = totals(losses.double().sum(), rows, plan, mesh, weights)
    return losses if reduction == "none" else reduced(total, reduction, losses.dtype)


def check_weights(weights: Tensor | None, plan: LossPlan) -> None:
    """Refuse weights that are not those of all classes.

    Raises:
        LayoutError: the number of weights and of classes.
    """
    if weights is not None and tuple(weights.shape) != (plan.form.classes,):
        raise LayoutError(
            f"cross_entropy '{plan.name}': weights are {tuple(weights.shape)}; there are {plan.form.classes} classes, "
            "of which every rank gives all"
        )


def totals(loss: Tensor, targets: Tensor, plan: LossPlan, mesh: GridLike, weights: Tensor | None = None) -> Tensor:
    """Return [3]: sums over all rows of the losses, of the weights of rows that count, of targets that are no class.

    Raises:
        RangeError: there are such; the same on every rank.  On a GPU, where looking at them would have the host wait,
            the loss is NaN instead.
    """
    ignored = targets == plan.ignore_index
    wrong = ((targets < 0) | (targets >= plan.form.classes)) & ~ignored
    counted = (~ignored).to(loss.dtype)
    if weights is not None:
        counted = counted * one_rank.row_weights(targets, plan.form, weights.detach().to(loss.dtype))[0]
    numbers = torch.stack((loss, counted.sum(), wrong.sum().to(loss)))
    total = reduce(numbers, plan.totals, mesh)
    if torch.compiler.is_compiling():
        compiled_layers.check_rows(total.detach()[2], f"cross_entropy '{plan.name}': targets that are no class")
    elif not has_streams(total.device.type) and not total.is_meta and int(total.detach()[2]):
        raise RangeError(
            f"cross_entropy '{plan.name}': {int(total[2])} targets are neither one of {plan.form.classes} classes nor "
            f"ignore_index={plan.ignore_index}"
        )
    return total


def reduced(total: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    """The mean or the sum of the losses, from `totals`.

    The mean of no rows is NaN, and its gradients are zeros, as those of torch.
    """
    loss, counted, wrong = total[0], *total[1:].detach()
    has_none = (counted == 0) & (reduction == "mean")
    loss = loss / torch.where(has_none, 1, counted) if reduction == "mean" else loss
    return torch.where((wrong > 0) | has_none, torch.nan, loss).to(dtype)


def dtype_of_loss(logits: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype of torch's `cross_entropy` of logits: theirs, or fp32 where autocast casts them before."""
    return torch.float32 if logits.itemsize < 4 and is_autocast_on(device_type) else logits


def whole_targets(targets: Tensor, layout: Layout, rows: int, mesh: GridLike, name: str) -> Tensor:
    """All targets, on every rank, from all or from this rank's rows of them; those are gathered."""
    targets, are_all = checked_targets(targets, rows, layout.num_splits(0), name)
    if torch.compiler.is_compiling():
        return targets if are_all else reduce(targets.long(), target_plan(layout, name), mesh)
    return targets if are_all else moved(targets.long(), target_plan(layout, name).steps, mesh, name, "forward")


def target_plan(layout: Layout, name: str) -> RelayoutPlan:
    """Return the relayout that gathers targets: one number for each row of hidden states that lie as `layout`."""
    return RelayoutPlan(Layout(layout.grid, layout.dims[0]), Layout(layout.grid, None), name=name)
