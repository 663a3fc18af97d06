"""`cross_entropy` and `linear_cross_entropy` of logits that are split over a grid, and a module of each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.volume import Volume
from ndtp.compute.cross_entropy import LossForm
from ndtp.errors import LayoutError
from ndtp.nn.linear import Linear
from ndtp.nn.padding import padded_to
from ndtp.nn.sharded import memory_of, volume_of
from ndtp.ops.linear_losses import LinearLossPlan
from ndtp.ops.linear_losses import linear_cross_entropy as fused
from ndtp.ops.losses import LossPlan
from ndtp.ops.losses import cross_entropy as split
from ndtp.ops.memory import Memory
from ndtp.runtime.process_grid import ProcessGrid

REDUCTIONS = ("mean", "sum", "none")
CHUNK_ROWS = 1024


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    layout: Layout,
    mesh: ProcessGrid,
    classes: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    name: str = "loss",
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits that are split over rows and classes, and are not gathered.

        logits   [M / (z x), V / y]     this rank's shard of L[M_zx, V_y]
        targets  [M], or [M / (z x)]    all of them, or this rank's rows
        returns  the dense loss, on every rank; with "none" those of this rank's rows

    Of a row the maximum, the sum of exponentials and the target's logit are merged over y: three numbers one way and
    two the other, and none in backward.  The gradient of a loss that every rank has alike is the dense one: call
    `backward` on it, on every rank, and divide it by nothing.

    Args:
        layout: of the logits, [M, V].
        classes: how many of the logits' columns are no padding, which stands behind them; default: all.
        weight: of the classes, [classes], all of them on every rank; it gets no gradient.
        ignore_index, label_smoothing, reduction: as torch's.
        z_loss: times the square of the log of the sum of exponentials of a row is added to its loss.

    Returns:
        In fp32 at least.

    Raises:
        LayoutError: targets that fit no rows.
        RangeError: a target that is no class; the same on every rank (on a GPU: a loss of NaN).
        ValueError: an unknown reduction, or a smoothing outside of [0, 1].
    """
    width = logits.shape[-1] * layout.num_splits(-1)
    plan = loss_plan(
        layout, width if classes is None else classes, ignore_index, label_smoothing, z_loss, reduction, name
    )
    return split(logits, targets, plan, mesh, reduction, weight)


def linear_cross_entropy(
    x: Tensor,
    head: Linear,
    targets: Tensor,
    *,
    chunk_rows: int = CHUNK_ROWS,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    name: str = "loss",
) -> Tensor:
    """`cross_entropy(head(x), targets)` in chunks of rows, of which one has logits at a time.

        x        [M / (z y), K / x]     this rank's shard, as `head.in_layout`
        targets  [M], or [M / (z y)]    all of them, or those of this rank's rows of x
        returns  the dense loss, on every rank

    Gradients of x and of the head are computed with the logits, in forward, so that no logits are kept and none are
    computed twice; where no gradient is wanted none are.  The weight is gathered once for all chunks.

    Args:
        head: its padding counts for nothing: classes are its `out_features`.
        chunk_rows: the most rows of logits that a rank holds at a time.
        others: as of `cross_entropy`; reduction is "mean" or "sum".

    Raises:
        LayoutError, RangeError, ValueError: as `cross_entropy` and `ndtp.nn.Linear`.
    """
    plan = linear_loss_plan(head, chunk_rows, ignore_index, label_smoothing, z_loss, reduction, name)
    rows = x.flatten(0, -2)
    own, bias = head.operands(rows)
    return fused(rows, own, bias, targets, plan, head.mesh, reduction, weights=weight)


def linear_loss_plan(
    head: Linear, chunk_rows: int, ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, name: str
) -> LinearLossPlan:
    if reduction == "none":
        raise ValueError("linear_cross_entropy: reduction='none' keeps nothing to scale\n  fix: 'mean' or 'sum'")
    if chunk_rows < 1:
        raise ValueError(f"linear_cross_entropy: chunk_rows={chunk_rows} is not at least 1")
    loss = loss_plan(head.out_layout, head.out_features, ignore_index, label_smoothing, z_loss, reduction, name)
    return _known_plan(head.plan, loss, chunk_rows)


@lru_cache(maxsize=256)
def _known_plan(head: MatMulPlan, loss: LossPlan, chunk_rows: int) -> LinearLossPlan:
    """Return the same plan for each step: programs are bound to plans, and a new plan would bind a new program."""
    return LinearLossPlan(head, loss, chunk_rows)


def loss_plan(
    layout: Layout, classes: int, ignore_index: int, smoothing: float, z: float, reduction: str, name: str
) -> LossPlan:
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction={reduction!r} is not one of {', '.join(REDUCTIONS)}")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"cross_entropy: label_smoothing={smoothing} is not in [0, 1]")
    return LossPlan(layout, LossForm(classes, smoothing, z), ignore_index, name)


class CrossEntropy(nn.Module):
    """`nn.CrossEntropyLoss` of logits that are split over a grid; arguments are those of `cross_entropy`."""

    weight: Tensor | None

    def __init__(
        self,
        *,
        layout: Layout,
        mesh: ProcessGrid,
        classes: int,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        name: str = "loss",
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.mesh, self.classes, self.reduction = mesh, classes, reduction
        self.in_layout, self.out_layout = layout, Layout(mesh.grid)
        self.plan = loss_plan(layout, classes, ignore_index, label_smoothing, z_loss, reduction, name)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return split(logits, targets, self.plan, self.mesh, self.reduction, self.weight)

    def volume(self, tokens: int, dtype: torch.dtype = torch.float32) -> Volume:
        """The exact traffic of `tokens` rows of logits of a dtype, in bytes received per rank."""
        return volume_of(self, self.mesh, self._inputs(tokens, dtype))

    def memory(self, tokens: int, dtype: torch.dtype = torch.float32, backend: str | None = None) -> Memory:
        """Bytes that a forward and backward of `tokens` rows need beside the logits; see `ndtp.ops.memory`."""
        return memory_of(self, self.mesh, self._inputs(tokens, dtype), (), backend)

    def _inputs(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """This rank's logits and all targets, without memory."""
        width = padded_to(self.classes, self.in_layout.num_splits(1))
        shape = self.in_layout.shard_shape((tokens, width))
        logits = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        return logits, logits.new_empty(tokens, dtype=torch.long)

    @classmethod
    def from_dense(
        cls, dense: nn.CrossEntropyLoss, *, layout: Layout, mesh: ProcessGrid, classes: int, **arguments: Any
    ) -> CrossEntropy:
        """Make the loss of an `nn.CrossEntropyLoss` on a grid; further arguments are the constructor's."""
        same = {name: getattr(dense, name) for name in ("weight", "ignore_index", "label_smoothing", "reduction")}
        return cls(layout=layout, mesh=mesh, classes=classes, **{**same, **arguments})

    def to_dense(self) -> nn.CrossEntropyLoss:
        """torch's, which has no z_loss."""
        if self.plan.form.z:
            raise LayoutError("CrossEntropy.to_dense: torch's has no z_loss")
        return nn.CrossEntropyLoss(
            self.weight,
            ignore_index=self.plan.ignore_index,
            label_smoothing=self.plan.form.smoothing,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        return f"{self.classes}, [{self.in_layout.label('MV')}]"


class LinearCrossEntropy(nn.Module):
    """A head and its loss as one module; arguments are those of `linear_cross_entropy`."""

    weight: Tensor | None

    def __init__(
        self,
        head: Linear,
        *,
        chunk_rows: int = CHUNK_ROWS,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        name: str = "loss",
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.head, self.reduction = head, reduction
        self.plan = linear_loss_plan(head, chunk_rows, ignore_index, label_smoothing, z_loss, reduction, name)
        self.in_layout, self.out_layout = head.in_layout, Layout(head.mesh.grid)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        own, bias = self.head.operands(rows)
        return fused(rows, own, bias, targets, self.plan, self.head.mesh, self.reduction, weights=self.weight)

    def volume(self, tokens: int, dgrad: bool = True, gathers_targets: bool = False) -> Volume:
        """The exact traffic of a forward and backward of `tokens` rows, in bytes received per rank.

        Args:
            dgrad: whether x needs a gradient.
            gathers_targets: whether each rank gives those of its rows.
        """
        x, targets = self._inputs(tokens, dgrad)
        return volume_of(self, self.head.mesh, (x, targets[: x.shape[0]] if gathers_targets else targets))

    def memory(self, tokens: int, dgrad: bool = True, backend: str | None = None) -> Memory:
        """Bytes that a forward and backward of `tokens` rows need, as of `ndtp.nn.Linear`; see `ndtp.ops.memory`."""
        return memory_of(self, self.head.mesh, self._inputs(tokens, dgrad), (), backend)

    def _inputs(self, tokens: int, dgrad: bool) -> tuple[Tensor, Tensor]:
        """This rank's rows and all targets, without memory."""
        shape = self.in_layout.shard_shape((tokens, self.head.padded_in))
        x = torch.empty(shape, dtype=self.head.weight.dtype, device="meta", requires_grad=dgrad)
        return x, x.new_empty(tokens, dtype=torch.long)

    @classmethod
    def from_dense(
        cls, head: nn.Linear, *, mesh: ProcessGrid, scheme: str = "3d", **arguments: Any
    ) -> LinearCrossEntropy:
        """Make the loss of a dense head; classes are padded where they do not divide, and further arguments are the
        loss's.

        A head of other arguments: `LinearCrossEntropy(Linear.from_dense(head, ...))`.
        """
        return cls(Linear.from_dense(head, mesh=mesh, scheme=scheme, pad=True, name="head"), **arguments)

    def to_dense(self) -> nn.Linear:
        """The head; a collective."""
        return self.head.to_dense()
