"""`ProcessGrid`: a `Grid` bound to this process, its torch process groups and one DeviceMesh for parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # later its default arguments would keep the world's group, see `let_go`

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import default_mesh_axes
from ndtp.algebra.wire import Wire
from ndtp.collectives.axis_groups import DIRECTIONS, AxisGroups, Made
from ndtp.collectives.backends import backends_by_device
from ndtp.collectives.buffer_ring import DEFAULT_BYTES, BufferRing
from ndtp.collectives.grid_options import GridOptions, own_gemm, sms_to_leave, world_ranks
from ndtp.collectives.groups import let_go_of_world
from ndtp.collectives.movers import collectives_of
from ndtp.compute.scaled_gemm import gemm_of
from ndtp.errors import GridError
from ndtp.runtime.foreign_meshes import refuse_joining, spare_advice
from ndtp.runtime.interleave import interleave
from ndtp.runtime.late_gradients import late_gradients_of
from ndtp.runtime.letting_go import let_go, let_go_of_mesh
from ndtp.runtime.list_operations import count_list_operations
from ndtp.runtime.program import Programs
from ndtp.runtime.step_state import StepState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ndtp.algebra.matmul_plan import MatMulPlan


class ProcessGrid:
    """The process groups of a grid, along every axis, as seen from this rank.

    A grid of one rank needs no `init_process_group`, makes no group and costs nothing.

    Args:
        grid: as many ranks as `torch.distributed` has, first axis slowest.
        timeout: seconds after which a collective that waits for a peer fails, naming the axis and the ranks waited
            for and who is to blame; from 0.001 to 1e9.  Default: 120, or NDTP_TIMEOUT of the environment.  On NCCL
            torch's watchdog enforces it.  A grid that is given one has process groups of its own, others share theirs:
            a new grid works after a group was lost to a peer that came too late.  On gloo they end with the grid.  What
            DTensor sends for parameters, such as `full_tensor`, goes over groups that grids of one timeout share.
        check: whether ranks compare plan, shapes and dtypes of every product, by one small all-gather each, so that
            those which deviate are named on every rank in a `MismatchError`: for tests and debugging.  Default: no.
            `parallelize(check=True)` compares calls of models instead.
        gemm: what multiplies on each rank: "torch", or "kernels" for those of `ndtp_kernels` (Triton on a GPU).  Their
            table must be the same on all ranks, which is checked here.
        collectives: who moves tensors: "torch" (gloo or NCCL), or "symmetric": every rank copies out of the memory of
            its peers, on GPUs by copy engines that take no multiprocessor, on CPUs out of shared memory; all ranks on
            one machine.  The same bytes.  See docs/gpus.md.
        sums: who adds up fp16 and bf16: "torch", or "fp32": ranks exchange their parts, as many bytes, and each adds up
            its own in fp32, in the order of the ranks, where NCCL's rings round at every hop.  On gloo it is always so.
        free_sms: multiprocessors that the GEMMs leave to collectives; of torch's on Hopper and later.  Default: with
            `gemm="kernels"` as many as the collectives can take at once, `max_ctas` a communicator.
        device_type: "cpu" or "cuda", which must have a backend; default: that of the backend (NCCL: "cuda").
        groups_per_axis: 2 gives the gathers along an axis one process group and its scatters and reductions another,
            so that neither queues behind the other.  Default: 2 on NCCL, where a group is one stream, else 1; and 1
            on a part of the world.
        high_priority: NCCL's streams have high priority: its kernels get free multiprocessors before a GEMM does.
        max_ctas: the most thread blocks that a collective of NCCL may use.  Default: so many that those of all
            communicators of the grid take a quarter of the device's multiprocessors.
        ring_bytes: memory for what collectives send, or receive to be added up or put in order; see
            `ndtp.collectives.buffer_ring.BufferRing`.  0: none is kept.
        register_buffers: take that memory from NCCL and register it with the groups.
        wire: the dtypes in which operands and results of products travel, such as "bf16", see `ndtp.Wire`.
        recipe: "bf16" or "fp8-rowwise": in which dtypes tensors travel and products multiply, see docs/wire.md.

    Attributes:
        name: what compiled code knows it by, see `grid_named`.
        rank: this process's rank on the grid.
        coordinate: axis -> position.
        options: what it was made with, and what that came to on its backend.
        groups: the process groups, and where this rank is among them.
        step: what the training step that runs here has learnt.
        programs: the chains of products that were bound here.
        backend: that of the process groups for `device_type`; None for a grid of one rank.
        mesh_axes: the dims of `device_mesh`: rank order, but x before y, and z last, so that weights `K_xz` are plain
            `Shard` placements.  Without axes of one rank, which say nothing: DTensor weighs every placement on every
            dim, and takes several times as long over the first call of an operation for each dim more.

    Raises:
        GridError: the grid has more or fewer ranks than there are, or an option has a value that makes no sense, or
            that the backend does not have.
        MismatchError: ranks have different tables of kernels.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        timeout: float | None = None,
        check: bool | None = None,
        gemm: str = "torch",
        collectives: str = "torch",
        sums: str = "torch",
        free_sms: int | None = None,
        device_type: str | None = None,
        groups_per_axis: int | None = None,
        high_priority: bool = True,
        max_ctas: int | None = None,
        ring_bytes: int = DEFAULT_BYTES,
        register_buffers: bool = False,
        wire: Wire | str | Mapping[str, str | bool | None] | None = None,
        recipe: str | None = None,
    ) -> None:
        options = GridOptions.of(
            timeout=timeout, check=check, gemm=gemm, collectives=collectives, sums=sums, free_sms=free_sms,
            device_type=device_type, groups_per_axis=groups_per_axis, high_priority=high_priority, max_ctas=max_ctas,
            ring_bytes=ring_bytes, register_buffers=register_buffers, wire=wire, recipe=recipe,
        )  # fmt: skip
        self._bind(grid, options, world_ranks(grid), {})

    def _bind(self, grid: Grid, options: GridOptions, global_ranks: list[int] | None, given: Made) -> None:
        """Make what the grid has in this process.

        Args:
            global_ranks: the ranks of torch's world, in the order of the grid's; None for a grid of one rank.
            given: process groups that there are already.
        """
        backends = None if global_ranks is None else backends_by_device()
        self.options = options = options.on(backends, grid)
        self.grid, self.global_ranks = grid, global_ranks
        self.timeout, self.check, self.wire = options.timeout, options.check, options.wire
        self.device_type: str = options.device_type or "cpu"
        self.backend = (backends or {}).get(self.device_type)
        self.groups = AxisGroups(grid, global_ranks, options, self.backend, given)
        self.groups_per_axis = self.groups.groups_per_axis
        taking = self.backend if options.collectives == "torch" else None  # copy engines take no multiprocessor
        leave = sms_to_leave(options.free_sms, taking, options.max_ctas, self.groups_per_axis, grid)
        self._gemm = own_gemm(options.gemm, options.free_sms, leave)
        self.gemm = gemm_of(self.wire, self._gemm)
        self.rank, self.coordinate = self.groups.rank, self.groups.coordinate
        ends = self.timeout if self.groups.kind.runs_in_host else None
        self.programs = Programs()
        finalize(self, let_go, self.programs, self.groups.made, self.groups.given, ends)
        in_order = default_mesh_axes(grid)
        self.mesh_axes = grid.nontrivial(in_order) or in_order[:1]
        self.device_mesh: DeviceMesh | None = None
        ring_groups: list[ProcessGroup] = []
        if global_ranks is not None:
            self.device_mesh = self._mesh_of_parameters(global_ranks)
            # All of them now, in one order on every rank, and not in the middle of a schedule.
            every = [self.groups.group((axis,), way) for way in DIRECTIONS for axis in self.mesh_axes]
            ring_groups = list(dict.fromkeys(every))
        self._refined: dict[tuple[object, ...], ProcessGrid] = {}
        self._first: ProcessGrid | None = None  # of which it is made by `sending`
        self._sending: WeakValueDictionary[Wire, ProcessGrid] = WeakValueDictionary()
        registered = options.register_buffers and ring_groups
        allocate = self.groups.kind.registered_memory(ring_groups) if registered else None
        self.ring = BufferRing(options.ring_bytes, allocate)
        if options.collectives == "symmetric":
            from ndtp.collectives.symmetric.collectives import check_usable

            check_usable(self.groups)
        self.step = StepState(late_gradients_of(None if global_ranks is None else dist.group.WORLD))
        self.collectives = collectives_of(self.groups, self.ring, self.step.recording, self.wire)
        self.name = f"{grid} #{next(_COUNT)}"
        _NAMED[self.name] = self
        if options.gemm == "kernels":
            from ndtp.collectives.cross_check import cross_check_kernel_table

            cross_check_kernel_table(self.groups)

    def _mesh_of_parameters(self, global_ranks: list[int]) -> DeviceMesh:
        """Make the DeviceMesh of parameters, over the same ranks with the axes in the order of `mesh_axes`."""
        from torch.distributed.device_mesh import DeviceMesh

        count_list_operations()
        refuse_joining()
        let_go_of_world()
        spare_advice(self.mesh_axes)
        grid = self.grid
        ranks = torch.tensor(global_ranks, dtype=torch.int, device="cpu").reshape(grid.shape)
        ranks = ranks.permute([grid.names.index(axis) for axis in default_mesh_axes(grid)])
        device_mesh = DeviceMesh.from_group(
            [self.groups.parameters_group(axis) for axis in self.mesh_axes],
            self.device_type,
            mesh=ranks.reshape([grid[axis] for axis in self.mesh_axes]),
            mesh_dim_names=self.mesh_axes,
        )
        device_mesh.ndtp_grid = str(grid)  # type: ignore[attr-defined]
        finalize(self, let_go_of_mesh, device_mesh)
        return device_mesh

    @classmethod
    def from_mesh(
        cls,
        device_mesh: DeviceMesh,
        axes: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> ProcessGrid:
        """Bind to (a slice of) a DeviceMesh of the user's own, whose process groups are used as they are.

        Args:
            axes: axis of the grid -> name of a mesh dim, slowest axis first.  Default: every mesh dim, by its name.
            timeout: as for the constructor; makes groups anew, with that timeout.
            options: the constructor's other options.  Those of process groups hold for the groups that are made here:
                a second one an axis, where `groups_per_axis` is 2.

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
        groups: Made = {((axis,), "gather"): device_mesh.get_group(name) for axis, name in axes.items()}
        own = GridOptions.of(timeout=timeout, device_type=device_mesh.device_type, **options)
        return grid_over(grid, own, ranks, groups)

    def group(self, axes: Sequence[str], direction: str = "gather") -> ProcessGroup:
        """The process group of the ranks that differ from this one on `axes` only.

        A group over several axes is made on first use, by its members together.

        Args:
            direction: "gather" or "scatter"; both have the same group where there is one group an axis.
        """
        return self.groups.group(axes, direction)

    def refine(self, **axes: Sequence[int]) -> ProcessGrid:
        """Return the same ranks with axes taken apart, see `ndtp.Grid.refine`; all ranks make each refinement once.

        It shares buffers and what a step learns with this one, and the process groups of the other axes.

        Raises:
            GridError: as `ndtp.Grid.refine`.
        """
        if not axes:
            return self
        key = tuple((axis, tuple(sizes)) for axis, sizes in axes.items())
        if key not in self._refined:
            grid, ranks = self.grid.refine(**axes), self.global_ranks
            given = {of: group for of, group in self.groups.given.items() if not set(of[0]) & set(axes)}
            options = replace(
                self.options, gemm="torch", free_sms=None, ring_bytes=0, register_buffers=False,
                groups_per_axis=self.groups_per_axis,
            )  # fmt: skip
            refined = grid_over(grid, options, ranks, given)
            refined.gemm, refined._gemm = self.gemm, self._gemm
            refined.step, refined.ring = self.step, self.ring
            refined.collectives = collectives_of(refined.groups, self.ring, self.step.recording, self.wire)
            self._refined[key] = refined
        return self._refined[key]

    def sending(self, wire: Wire | str | Mapping[str, str | bool | None] | None) -> ProcessGrid:
        """Return these ranks with another wire: the same groups, buffers and training step.

        Modules, `parallelize` and the commands make one of their `wire=`; asked again, it is the same object.

        Args:
            wire: as for the constructor; None: this grid itself.

        Raises:
            GridError: a wire that is none.
        """
        wire = Wire.of(wire)
        if wire is None or wire == self.wire:
            return self
        first = self._first or self
        if wire == first.wire:
            return first
        made = first._sending.get(wire)
        if made is None:
            made, options = object.__new__(ProcessGrid), replace(first.options, wire=wire)
            vars(made).update(
                vars(first), wire=wire, options=options, _first=first, _refined={}, name=f"{self.grid} #{next(_COUNT)}"
            )
            made.gemm = gemm_of(wire, first._gemm)
            made.collectives = collectives_of(made.groups, made.ring, made.step.recording, wire)
            first._sending[wire] = _NAMED[made.name] = made
        return made

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside leave out the all-reduce of weights' gradients; the first one outside makes up for it.

            for x in micro_batches[:-1]:
                with mesh.accumulate():
                    loss(model(x)).backward()
            loss(model(micro_batches[-1])).backward()

        Held back is what is summed over axes that replicate a weight, such as `dp`.  Until it is reduced a gradient is
        not in `.grad`, but in a sum of its own; reduce-scatters run every time, since that sum has the size of the
        stored shard.  Where no backward follows, call `reduce_gradients`.

        `torch.autograd.grad` gives gradients of its own loss alone, reduced, inside as outside.  Hooks of a weight see
        the sum when it is finished.  Compiled code reduces its gradients every time.  Sums are kept as `.grad` is, from
        an exception too, unless it ends a backward: then nobody can say what they hold, and all are dropped.
        """
        return self.step.accumulate()

    def interleave(self, step: Callable[..., object], *parts: Sequence[object]) -> list[object]:
        """`list(map(step, *parts))`, where the parts of a batch run in turns: one computes while another communicates.

            def step(x, y):
                loss = loss_of(model(x), y) / 2
                loss.backward()
                return loss

            losses = mesh.interleave(step, inputs.chunk(2), targets.chunk(2))

        Each part runs forward and backward in a thread of its own; it hands over where it would wait for a collective,
        at the same points on every rank.  Gradients add up, and all-reduces that `accumulate` would hold back run once.
        Results come without their graphs.  Parts but the first draw random numbers of their own, the same on every
        grid.  An exception in one part ends all.  See docs/overlap.md for when it pays.

        Raises:
            GridError: no parts, or called in a part, in a backward, or by compiled code.
            ValueError: sequences of different lengths.
        """
        return interleave(self.step, self.device_type, step, list(zip(*parts, strict=True)))

    def reduce_gradients(self) -> None:
        """Finish the gradients that `accumulate` held back, and add them to `.grad`; a collective."""
        self.step.reduce_gradients(self)

    def discard_gradients(self) -> None:
        """Drop the gradients that `accumulate` held back, as `zero_grad` drops those in `.grad`."""
        self.step.partial_sums.discard()

    def chunks_chosen(self, plan: MatMulPlan) -> dict[int, tuple[int, str]]:
        """Return the choices of `chunks="auto"` for a plan so far: rows -> the number of chunks, and why."""
        return self.step.chunks.of_plan(plan)

    def describe(self, axes: Sequence[str] = ()) -> str:
        """This rank and its coordinate, and the peers along `axes`: for errors."""
        return self.groups.describe(axes)

    def __deepcopy__(self, memo: object) -> ProcessGrid:
        return self  # a copied module lives on the same ranks; process groups cannot be copied

    def __repr__(self) -> str:
        return f"ProcessGrid({self.grid}; rank {self.rank})"


def grid_over(
    grid: Grid, options: GridOptions, global_ranks: list[int] | None, given: Made | None = None
) -> ProcessGrid:
    """Make a process grid over some ranks of the world.

    Args:
        global_ranks: in the order of the grid's ranks; None for a grid of one rank.
        given: process groups that there are already, by axes and direction.
    """
    made = object.__new__(ProcessGrid)
    made._bind(grid, options, global_ranks, {} if given is None else given)
    return made


# Compiled code holds text, not objects, and must find the grid when it runs, as torch's own finds process groups.  The
# grids live as long as somebody else holds them.
_COUNT = count()
_NAMED: WeakValueDictionary[str, ProcessGrid] = WeakValueDictionary()


def grid_named(name: str) -> ProcessGrid:
    """The process grid that has this `name` in this process.

    Raises:
        GridError: there is none any more.
    """
    mesh = _NAMED.get(name)
    if mesh is None:
        raise GridError(f"ProcessGrid '{name}' of a compiled function is gone\n  fix: keep a reference to the grid")
    return mesh
