"""A process grid that sends nothing: the executor runs on it with meta tensors, to tell shapes and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ndtp.algebra.grid import Grid
from ndtp.collectives.buffer_ring import BufferRing
from ndtp.collectives.collectives import Collectives, GlooCollectives
from ndtp.compute.gemm import TorchGemm
from ndtp.runtime.late_gradients import LateGradients
from ndtp.runtime.step_state import StepState


class _Silent:
    """Collectives that prepare what they would send, make room for what they would receive, and send nothing."""

    def _send(self, *_: Any) -> None:
        return None

    def describe(self, axes: Sequence[str]) -> str:
        return "in a dry run"

    _gather = _exchange = _scatter = _sum_everywhere = _send


class _SilentNccl(_Silent, Collectives):
    pass


class _SilentGloo(_Silent, GlooCollectives):
    pass


SILENT: dict[str, type[Collectives]] = {"gloo": _SilentGloo, "nccl": _SilentNccl}


@dataclass(frozen=True)
class _DryGroup:
    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class DryGrid:
    """What the executor asks of a `ProcessGrid`, without process groups: for tensors that have no memory."""

    def __init__(self, grid: Grid, rank: int = 0, backend: str = "gloo") -> None:
        self.grid, self.rank, self.gemm, self.ring = grid, rank, TorchGemm(), BufferRing(0)
        self.check, self.device_mesh = False, None
        self.step = StepState(LateGradients())
        self.collectives = SILENT[backend](self)  # type: ignore[arg-type]

    def group(self, axes: Sequence[str], direction: str) -> _DryGroup:
        return _DryGroup(self.grid.size(tuple(axes)))
