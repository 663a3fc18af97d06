"""The training of `ndtp demo`: a small byte-level transformer, on the text of Python's own documentation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.algebra.grid import Grid
from ndtp.collectives.meter import CommMeter
from ndtp.models.byte_model import ByteModel, ByteModelSizes
from ndtp.runtime.process_grid import ProcessGrid

if TYPE_CHECKING:
    from ndtp.cli.progress import Counter

LOSS_TOLERANCE = 1e-3  # a hundred steps of AdamW in fp32 were seen to drift by 1e-6


@dataclass(frozen=True)
class DemoTask:
    """The task of a run, the same on every grid: sizes, seed and number of steps."""

    steps: int
    heads: int = 8
    layers: int = 2
    context: int = 32
    learning_rate: float = 3e-3
    seed: int = 0

    @classmethod
    def on(cls, ranks: int, steps: int) -> DemoTask:
        """Return a task with as many heads, and sequences, as every grid of so many ranks divides."""
        return cls(steps, heads=ranks * max(-(-8 // ranks), 1))

    @property
    def batch(self) -> int:
        return self.heads

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def sizes(self) -> ByteModelSizes:
        return ByteModelSizes(width=8 * self.heads, inner=32 * self.heads, layers=self.layers, heads=self.heads)


@dataclass(frozen=True)
class DemoRun:
    """The record of one rank's training run.  Bytes are those of one step, forward and backward."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    predicted_bytes: int = 0
    measured_bytes: int = 0
    by_axes: dict[str, int] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms) if self.step_ms else float("nan")


@dataclass(frozen=True)
class GridRun:
    """A training run on a grid, as all ranks saw it."""

    scheme: str
    grid: Grid
    by_rank: tuple[DemoRun, ...]
    dense: DemoRun

    @property
    def name(self) -> str:
        axes = " ".join(f"{axis}={self.grid[axis]}" for axis in self.grid)
        return f"{self.scheme.upper()} {axes}"

    @property
    def deviation(self) -> float:
        """Largest difference of a loss from the dense one, over steps and ranks; NaN counts as infinite."""
        pairs = (
            (ours, theirs) for run in self.by_rank for ours, theirs in zip(run.losses, self.dense.losses, strict=True)
        )
        return max(abs(a - b) if a == a else float("inf") for a, b in pairs)

    @property
    def measured_bytes(self) -> int:
        """Return the measured bytes; where ranks differ from the prediction, those of a rank that does."""
        predicted = self.by_rank[0].predicted_bytes
        return next((r.measured_bytes for r in self.by_rank if r.measured_bytes != predicted), predicted)

    @property
    def failure(self) -> str | None:
        first = self.by_rank[0]
        if self.measured_bytes != first.predicted_bytes:
            return f"{self.measured_bytes:,} bytes a step measured, {first.predicted_bytes:,} predicted"
        if self.deviation > LOSS_TOLERANCE:
            return f"a loss is off by {self.deviation:.2g}; the tolerance is {LOSS_TOLERANCE:g}"
        return None

    def as_json(self) -> dict[str, Any]:
        first = self.by_rank[0]
        return {
            "name": self.name,
            "ok": self.failure is None,
            "scheme": self.scheme,
            "grid": {axis: self.grid[axis] for axis in self.grid},
            "predicted_bytes": first.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "predicted_bytes_by_axis": first.by_axes,
            "max_deviation": self.deviation,
            "step_ms": first.median_ms,
            "losses": first.losses,
        }


def text() -> Tensor:
    """The help topics of the Python standard library, as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def train(counter: Counter, task: DemoTask, sizes: Mapping[str, int] | None, scheme: str) -> DemoRun:
    """Train on every rank; without a grid the dense model, on rank 0 alone.

    The bytes of the first step are metered; its time, which counts the meter, is left out.
    """
    mesh = ProcessGrid(Grid(sizes)) if sizes else None
    if mesh is None and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return DemoRun()
    torch.manual_seed(task.seed)
    model = ByteModel(task.sizes)
    run = DemoRun()
    if mesh is not None:
        predicted = model.to_grid(mesh, scheme).volume(task.batch, task.context)
        run = DemoRun(predicted_bytes=predicted.total, by_axes=predicted.by("axes"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, foreach=True)
    batches = torch.Generator().manual_seed(task.seed)
    document = text()
    measured = 0
    for step in range(task.steps):
        starts = torch.randint(len(document) - task.context, (task.batch, 1), generator=batches)
        chunk = document[starts + torch.arange(task.context + 1)].long()
        start = time.perf_counter()
        meter = CommMeter()
        if step == 0:
            with meter:
                loss = _forward_backward(model, chunk)
            measured = meter.volume.total
        else:
            loss = _forward_backward(model, chunk)
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate * warm_cosine(step, task.steps)
        optimizer.step()
        optimizer.zero_grad()
        if step:
            run.step_ms.append((time.perf_counter() - start) * 1e3)
        run.losses.append(loss)
        counter.advance()
    return DemoRun(run.losses, run.step_ms, run.predicted_bytes, measured, run.by_axes)


def _forward_backward(model: ByteModel, chunk: Tensor) -> float:
    loss = model(chunk[:, :-1], chunk[:, 1:])
    loss.backward()
    return loss.item()


def warm_cosine(step: int, steps: int) -> float:
    """Warm up over a tenth, then a cosine."""
    warm = max(steps // 10, 1)
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(step - warm, 0) / max(steps - warm, 1)))
