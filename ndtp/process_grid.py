"""`ProcessGrid`: a `Grid` bound to this process, its torch process groups and one DeviceMesh for parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ndtp.collectives import Collectives
from ndtp.errors import GridError
from ndtp.gemm import KernelGemm, TorchGemm
from ndtp.grid import Grid
from ndtp.prefetch import WeightPrefetch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

GEMMS = {"torch": TorchGemm, "kernels": KernelGemm}


class ProcessGrid:
    """The process groups of a grid, one along every axis, as seen from this rank.

    A grid of one rank needs no `init_process_group`, makes no group and costs nothing.

    Args:
        grid: as many ranks as `torch.distributed` has, first axis slowest.
        timeout: seconds after which a collective that waits for a peer fails, naming the axis and the ranks waited
            for.  Default: torch's.  On NCCL torch's watchdog enforces it.
        check: before every product, compare plan, shapes and dtypes across all ranks and raise a `MismatchError` that
            names the ranks that deviate, instead of a hang.  One small all-gather a product: for tests and debugging.
        gemm: what multiplies on each rank: "torch", or "kernels" for those of `ndtp_kernels` (Triton on a GPU).  Their
            table must be the same on all ranks, which is checked here.
        device_type: "cpu" or "cuda"; default: that of the backend (NCCL: "cuda").

    Attributes:
        rank: this process's rank on the grid.
        coordinate: axis -> position.
        backend: that of the process groups for `device_type`; None for a grid of one rank.
        mesh_axes: the order of the dims of `device_mesh`: rank order with `z` moved last, so that weights `K_xz` are
            plain `Shard` placements.

    Raises:
        GridError: the grid has more or fewer ranks than there are.
        MismatchError: ranks have different tables of kernels.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        timeout: float | None = None,
        check: bool = False,
        gemm: str = "torch",
        device_type: str | None = None,
    ) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if grid.num_ranks not in (world, 1):
            raise GridError(
                f"ProcessGrid: grid {grid} has {grid.num_ranks} ranks, torch.distributed has {world}\n"
                f"  fix: a grid of {world} ranks, ProcessGrid.from_mesh for a part of them"
                + ("" if dist.is_initialized() else ", or init_process_group first")
            )
        self._bind(grid, list(range(world)) if grid.num_ranks > 1 else None, {}, timeout, check, gemm, device_type)

    @classmethod
    def from_mesh(
        cls,
        device_mesh: DeviceMesh,
        axes: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        check: bool = False,
        gemm: str = "torch",
    ) -> ProcessGrid:
        """Bind to (a slice of) a DeviceMesh of the user's own, whose process groups are used as they are.

        Args:
            axes: axis of the grid -> name of a mesh dim, slowest axis first.  Default: every mesh dim, by its name.
            timeout: as for the constructor; makes groups anew, with that timeout.

        Raises:
            GridError: a mesh dim that is not there, or left out; a mesh that this rank is not part of, or whose ranks
                do not ascend.
        """
        names = device_mesh.mesh_dim_names
        axes = dict(axes) if axes is not None else {name: name for name in names or ()}
        if names is None or sorted(axes.values()) != sorted(names):
            raise GridError(
                f"ProcessGrid.from_mesh: axes={axes} must name every dim of the mesh, {names}, once\n"
                "  fix: slice the mesh first, as in mesh['tp0', 'tp1']"
            )
        if device_mesh.get_coordinate() is None:
            raise GridError("ProcessGrid.from_mesh: this rank is not part of the mesh; call it on the mesh's ranks")
        if any((device_mesh.mesh.diff(dim=dim) < 0).any() for dim in range(device_mesh.ndim)):
            raise GridError(
                f"ProcessGrid.from_mesh: {device_mesh} has ranks in descending order along a dim; torch's groups order "
                "them ascending\n  fix: a mesh whose ranks ascend along every dim"
            )
        order = [names.index(name) for name in axes.values()]
        grid = Grid({axis: device_mesh.size(dim) for axis, dim in zip(axes, order, strict=True)})
        ranks = device_mesh.mesh.permute(order).flatten().tolist()
        # The groups of the mesh have a timeout of their own.
        groups: dict[tuple[str, ...], ProcessGroup] = {
            (axis,): device_mesh.get_group(name) for axis, name in axes.items() if timeout is None
        }
        self = cls.__new__(cls)
        self._bind(grid, ranks, groups, timeout, check, gemm, device_mesh.device_type)
        return self

    def _bind(
        self,
        grid: Grid,
        global_ranks: Sequence[int] | None,
        groups: dict[tuple[str, ...], ProcessGroup],
        timeout: float | None,
        check: bool,
        gemm: str,
        device_type: str | None,
    ) -> None:
        if gemm not in GEMMS:
            raise GridError(f"ProcessGrid: gemm={gemm!r} is not one of {', '.join(GEMMS)}")
        self.gemm: TorchGemm = GEMMS[gemm]()
        self.grid = grid
        self.check = check
        self.timeout = timeout
        self.global_ranks = global_ranks
        self.rank = 0 if global_ranks is None else global_ranks.index(dist.get_rank())
        self.coordinate = grid.coordinate(self.rank)
        backends = {} if global_ranks is None else backends_by_device()
        self.device_type = device_type or ("cuda" if "nccl" in backends.values() else "cpu")
        self.backend = backends.get(self.device_type)
        self._groups = groups
        self.mesh_axes = tuple(axis for axis in grid if axis != "z") + tuple(axis for axis in grid if axis == "z")
        self.device_mesh: DeviceMesh | None = None
        if global_ranks is not None:
            from torch.distributed.device_mesh import DeviceMesh

            ranks = torch.tensor(global_ranks, dtype=torch.int).reshape(grid.shape)
            self.device_mesh = DeviceMesh.from_group(
                [self.group((axis,)) for axis in self.mesh_axes],
                self.device_type,
                mesh=ranks.permute([grid.names.index(axis) for axis in self.mesh_axes]),
                mesh_dim_names=self.mesh_axes,
            )
        self.collectives = Collectives.of(self)
        self.prefetch = WeightPrefetch()
        # Sequence numbers in autograd of the last products: a weight's gradient is waited for when backward has gone
        # past the oldest of them.  Two products hide a reduction, and bound the gradients that are held unreduced.
        self.recent_products: deque[int] = deque(maxlen=2)
        if gemm == "kernels":
            from ndtp.cross_check import cross_check_kernel_table

            cross_check_kernel_table(self)

    def group(self, axes: Sequence[str]) -> ProcessGroup:
        """The process group of the ranks that differ from this one on `axes` only.

        A group over several axes is made on first use, by its members together.
        """
        key = tuple(axes)
        if key not in self._groups:
            self._groups[key] = self._make_group(key)
        return self._groups[key]

    def _make_group(self, axes: tuple[str, ...]) -> ProcessGroup:
        if self.global_ranks is None:
            raise GridError(f"grid {self.grid} has one rank and no process groups")
        # torch names a group that its members alone make by how many groups they have: ranks that are in different
        # numbers of groups of the user's own would wait for each other under different names.  So where the grid is the
        # whole world, all of it makes all groups along the axes; a part of it cannot.
        alone = len(self.global_ranks) < dist.get_world_size()
        parallel = [self.rank] if alone else range(self.grid.num_ranks)
        groups = {tuple(sorted(self.global_ranks[r] for r in self.grid.group(rank, axes))): None for rank in parallel}
        made = {}
        for members in groups:
            made[members] = dist.new_group(
                list(members),
                timeout=None if self.timeout is None else timedelta(seconds=self.timeout),
                use_local_synchronization=alone,
                group_desc=f"ndtp_{'_'.join(axes)}",
            )
        return next(group for members, group in made.items() if self.global_ranks[self.rank] in members)

    def describe(self, axes: Sequence[str] = ()) -> str:
        """This rank and its coordinate, and the peers along `axes`: for errors."""
        where = ", ".join(f"{axis}={position}" for axis, position in self.coordinate.items())
        peers = [str(rank) for rank in self.grid.group(self.rank, tuple(axes)) if rank != self.rank]
        return f"rank {self.rank} ({where})" + (
            f" waited for rank{'s' * (len(peers) > 1)} {', '.join(peers)}" * bool(axes)
        )

    def __deepcopy__(self, memo: object) -> ProcessGrid:
        return self  # a copied module lives on the same ranks; process groups cannot be copied

    def __repr__(self) -> str:
        return f"ProcessGrid({self.grid}; rank {self.rank})"


def backends_by_device() -> dict[str, str]:
    """Device type -> backend of the default process group.

    `dist.get_backend` says "undefined" after an `init_process_group` that names none.
    """
    return dict(entry.split(":") for entry in dist.get_backend_config().split(",") if ":" in entry)
