"""`GridLike`: the part of a process grid by which operations are bound and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ndtp.algebra.grid import Grid
    from ndtp.algebra.wire import Wire
    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.collectives import Collectives
    from ndtp.compute.gemm import TorchGemm
    from ndtp.runtime.program import Programs
    from ndtp.runtime.step_state import StepState


class GridLike(Protocol):
    """A grid that operations run on: a `ProcessGrid`, or a `DryGrid`, on which nothing is sent.

    Attributes are those of `ProcessGrid`.
    """

    @property
    def grid(self) -> Grid: ...
    @property
    def rank(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def global_ranks(self) -> list[int] | None: ...
    @property
    def device_type(self) -> str: ...
    @property
    def backend(self) -> str | None: ...
    @property
    def wire(self) -> Wire | None: ...
    @property
    def check(self) -> bool | None: ...
    @property
    def mesh_axes(self) -> tuple[str, ...]: ...
    @property
    def device_mesh(self) -> DeviceMesh | None: ...
    @property
    def groups(self) -> AxisGroups: ...
    @property
    def gemm(self) -> TorchGemm: ...
    @property
    def step(self) -> StepState: ...
    @property
    def programs(self) -> Programs: ...
    @property
    def collectives(self) -> Collectives: ...

    def refine(self, **axes: Sequence[int]) -> GridLike:
        """See `ProcessGrid.refine`."""
        ...

    def sending(self, wire: Wire | None) -> GridLike:
        """See `ProcessGrid.sending`."""
        ...
