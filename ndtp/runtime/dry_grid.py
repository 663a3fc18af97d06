"""A process grid that sends nothing: programs are bound to it and run with meta tensors, to tell shapes and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import default_mesh_axes
from ndtp.algebra.volume import Traffic, Volume
from ndtp.algebra.wire import Wire
from ndtp.collectives.axis_groups import AxisGroups
from ndtp.collectives.backends import GLOO, MOVING, backend_named
from ndtp.collectives.buffer_ring import BufferRing
from ndtp.collectives.collectives import Collectives
from ndtp.collectives.grid_options import GridOptions
from ndtp.collectives.handles import Handle, Route
from ndtp.collectives.movers import collectives_for
from ndtp.compute.gemm import TorchGemm
from ndtp.compute.scaled_gemm import gemm_of
from ndtp.dtypes import name_of
from ndtp.runtime.late_gradients import LateGradients
from ndtp.runtime.program import Programs
from ndtp.runtime.step_state import StepState


class _Silent:
    """Collectives that prepare what they would send, make room for what they would receive, and send nothing.

    Attributes:
        moved: the traffic so far, as the algebra of each step has it.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.moved: list[Traffic] = []

    def launch(self, route: Route, tensor: Tensor, out: Tensor | None = None, ahead: bool = False) -> Handle:
        if not route.follows:  # what it ends was counted as a whole
            dtype = name_of(tensor.dtype) if route.codec is None else route.codec.form.name
            sent = route.num_bytes(tensor), route.received, " ".join(route.op), dtype
            self.moved.append(Traffic(route.phase, route.kind, route.axes, *sent))
        handle: Handle = super().launch(route, tensor, out, ahead)  # type: ignore[misc]
        return handle

    def _send(self, *_: object) -> None:
        return None

    _gather = _exchange = _swap_blocks = exchange_parts = _scatter = _sum_everywhere = _send


@cache
def _silent(backend: str) -> type[Collectives]:
    """The collectives of a backend, which send nothing."""
    return type("Silent", (_Silent, collectives_for(backend_named(backend))), {})


def dry_backend(name: str | None) -> str:
    """The backend as which a dry run behaves: the named one, or gloo where its collectives are not known."""
    return name if name in MOVING else GLOO.name


class _DryGroups(AxisGroups):
    """The groups of any rank of a grid of any size, none of which exists as a process."""

    def __init__(self, grid: Grid, rank: int, backend: str) -> None:
        super().__init__(grid, None, GridOptions(device_type="meta"), backend)
        self.rank, self.coordinate = rank, grid.coordinate(rank)

    def group(self, axes: Sequence[str], direction: str = "gather") -> Any:
        return _DryGroup(self.grid.size(tuple(axes)))

    def describe(self, axes: Sequence[str] = ()) -> str:
        return "in a dry run"


@dataclass(frozen=True)
class _DryGroup:
    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class DryGrid:
    """A `ProcessGrid` without process groups, for chains of tensors that have no memory.

    Args:
        beside: the one whose training step this one is a part of, and in whose volume its own counts.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int = 0,
        backend: str = GLOO.name,
        wire: Wire | None = None,
        beside: DryGrid | None = None,
    ) -> None:
        self.grid, self.rank, self.gemm = grid, rank, gemm_of(wire, TorchGemm())
        self.name, self.device_type = f"a dry run of {grid}", "meta"
        self.check, self.device_mesh, self.global_ranks = False, None, None
        self.groups = _DryGroups(grid, rank, backend)
        self.mesh_axes = grid.nontrivial(default_mesh_axes(grid))
        self.step: StepState = StepState(LateGradients()) if beside is None else beside.step
        self.programs = Programs()
        self.backend = backend
        silent: Any = _silent(backend)(self.groups, BufferRing(0), self.step.recording)
        if beside is not None:
            silent.moved = beside.collectives.moved  # type: ignore[attr-defined]
        self.collectives: Collectives = silent
        self.collectives.wire = self.wire = wire

    @property
    def volume(self) -> Volume:
        """Return the bytes that would have been received so far."""
        silent: Any = self.collectives
        return Volume.of(silent.moved)

    def refine(self, **axes: Sequence[int]) -> DryGrid:
        """See `ProcessGrid.refine`."""
        return DryGrid(self.grid.refine(**axes), self.rank, self.backend, self.wire, self) if axes else self

    def sending(self, wire: Wire | None) -> DryGrid:
        """See `ProcessGrid.sending`."""
        return self if wire is None or wire == self.wire else DryGrid(self.grid, self.rank, self.backend, wire, self)
