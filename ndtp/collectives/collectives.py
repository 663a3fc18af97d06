"""Collectives with handles.  One class a backend; all bytes pass through `Collectives.launch` or `Collectives.run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions

from ndtp.algebra.steps import POINT_TO_POINT, Step, apply, target_of
from ndtp.algebra.wire import KINDS, part_of
from ndtp.collectives.codecs import CODECS, Codec
from ndtp.collectives.coded import coded_routes
from ndtp.collectives.direct_exchange import Past
from ndtp.collectives.flight import DONE, WAITED
from ndtp.collectives.handles import Begin, Channel, Handle, Relay, Route, Shape, Started, Underway
from ndtp.collectives.in_line import check_out, copied_from, landing_of, real, with_size
from ndtp.collectives.labels import Label
from ndtp.collectives.own_presence import flight_of_world
from ndtp.collectives.recorder import Recording, observed
from ndtp.collectives.streams import has_streams
from ndtp.collectives.turns import TURN
from ndtp.collectives.watch import Watch, failure
from ndtp.compute.traces import refuse_traces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ndtp.algebra.wire import Wire
    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.buffer_ring import BufferRing

OPERANDS = ("A", "B", "dC")  # of products, forward and backward
_GATHER, _EXCHANGE = AllgatherOptions(), AllToAllOptions()
_SCATTER, _REDUCE = ReduceScatterOptions(), AllreduceOptions()
for _options in (_GATHER, _SCATTER, _REDUCE, _EXCHANGE):
    _options.asyncOp = True  # type: ignore[attr-defined]
_modes_on = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]  # a meter may be among them


class Collectives:
    """The collectives of one `ProcessGrid`, by torch's own implementations (NCCL).

    Args:
        ring: lends buffers.
        recording: who looks on.

    Attributes:
        wire: the dtypes in which tensors of products travel, where these are others than they are computed in.
        marks_streams: whether a handle remembers the stream on which it was started.
        in_flight: the number of handles that were started and are neither waited for nor dropped.
    """

    orders_by_stream = True  # waiting blocks a stream, not the host
    arrives_in_parts = False  # a gather tells which of its parts have come, see `Handle.arriving`

    def __init__(self, groups: AxisGroups, ring: BufferRing, recording: Recording) -> None:
        # None of these holds the process grid: a grid goes when nobody needs it, not when garbage is collected.
        self.groups, self.ring, self.recording = groups, ring, recording
        self.describe = groups.describe
        self.wire: Wire | None = None
        self.marks_streams = self.orders_by_stream and has_streams(groups.device_type)
        self._has_own_launch = type(self).launch is not Collectives.launch
        self.in_flight, self.flight = 0, None if groups.global_ranks is None else flight_of_world()

    # ------------------------------------------------------------------------------------------------------ starting

    def start(
        self,
        step: Step,
        tensor: Tensor,
        op: tuple[str, ...],
        phase: str,
        *,
        part: str = "",
        out: Tensor | None = None,
        blocks: bool = False,
    ) -> Handle | Relay:
        """Bind a collective step and launch it on this rank's `tensor`; arguments are those of `route`.

        Args:
            out: where to put the result; contiguous, and of its shape and dtype.

        Raises:
            ValueError: an `out` that the result does not fit, or blocks of what is neither gathered nor scattered.
        """
        if blocks and out is not None and step.kind == "all_gather":
            raise ValueError(f"{step}: blocks of columns come of a gather without `out`")
        routes = self.routes(step, op, phase, tuple(tensor.shape), tensor.dtype, part=part, blocks=blocks)
        if len(routes) == 1:
            return self.launch(routes[0], tensor, out)
        if out is not None:
            check_out(out, routes[-1].shape, tensor)
        return Relay(self, self.launch(routes[0], tensor), routes[1], out)

    def launch(self, route: Route, tensor: Tensor, out: Tensor | None = None, ahead: bool = False) -> Handle:
        """Start a collective on this rank's `tensor`, which has the shape that the route was bound to.

        Args:
            out: where to put the result; contiguous, and of its shape and dtype.
            ahead: it is for a product yet to come, where its bytes are counted.

        Raises:
            ValueError: an `out` that the result does not fit.
        """
        if out is not None:
            check_out(out, route.shape, tensor)
        if tensor._is_zerotensor():  # a gradient of nothing but zeros, for which torch takes no memory
            tensor = tensor.clone()
        looks = self.recording.recorder is not None or self.recording.inspector is not None
        if looks or ahead or _profiler_enabled() or _modes_on():
            return self._launch_watched(route, tensor, out, ahead)
        try:
            past = route.channel.past
            if past is not None and past.given_up:
                self._finish_given_up(past)
            entry = route.enter(self, tensor)
            return Handle(self, route, route.begin(tensor, out), entry)
        except RuntimeError as error:
            raise failure(route.label(), self.describe, error, route.ranks) from error

    def run(self, route: Route, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the result of a collective for which nothing is done meanwhile: `launch` and `wait` in one.

        Args:
            out: as of `launch`, and it fits; an all-reduce may have the tensor itself.
        """
        looks = self.recording.recorder is not None or self.recording.inspector is not None or self._has_own_launch
        if looks or TURN.get() is not None or _profiler_enabled() or _modes_on() or tensor._is_zerotensor():
            return self.launch(route, tensor, out).wait()  # type: ignore[no-any-return]
        borrowed: tuple[Tensor, ...] = ()
        try:
            past = route.channel.past
            if past is not None and past.given_up:
                self._finish_given_up(past)
            entry = None if self.flight is None else route.enter(self, tensor)
            work, finish, _held, borrowed = route.begin(tensor, out)
            if entry is not None:
                entry[WAITED] = time.monotonic()
            if work is not None:
                work.wait()
            result = finish()
            if borrowed:
                self.ring.give_back(borrowed)
                borrowed = ()
            if entry is not None:
                entry[DONE] = time.monotonic()
            return result
        except RuntimeError as error:
            raise failure(route.label(), self.describe, error, route.ranks) from error
        finally:
            if borrowed:
                self.ring.forget(borrowed)

    def _launch_watched(self, route: Route, tensor: Tensor, out: Tensor | None, ahead: bool) -> Handle:
        """`launch` where a meter counts, or a profiler or recorder looks on."""
        label, begin, recorder = route.label(), route.begin, self.recording.recorder
        if _modes_on():
            refuse_traces(label.title)
        if ahead:
            label.ahead = route.num_bytes(tensor)
        self.recording.inspect(label, tensor)
        if recorder is not None or _profiler_enabled():
            begin = observed(begin, recorder, label)
        entry = route.enter(self, tensor)
        with Watch(self.describe, label, route.ranks, records=False):
            if route.channel.past is not None:
                self._finish_given_up(route.channel.past)
            return Handle(self, route, begin(tensor, out), entry, label)

    def _finish_given_up(self, past: Past) -> None:
        """Wait for what was dropped on a group, where the order of streams does not."""

    # ------------------------------------------------------------------------------------------------------- binding

    def routes(
        self,
        step: Step,
        op: tuple[str, ...],
        phase: str,
        shape: Shape,
        dtype: torch.dtype,
        *,
        part: str = "",
        blocks: bool = False,
        kind: str = "",
    ) -> tuple[Route, ...]:
        """Bind a collective step to tensors of one shape: one route, or two, of which the second goes on.

        Args:
            step: anything but a slice.
            op: what errors and profiles call it, such as ("matmul", "A").
            phase: "forward", "dgrad" or "wgrad".
            part: which chunk of how many, such as "2/4".
            blocks: the gathered matrix stays, or the scattered one comes, as blocks of columns [p, rows, columns / p].
            kind: of the tensors, for the wire, see `ndtp.Wire`; default: what `op` says.
        """

        def bind() -> Route:
            return self._route(step, op, phase, shape, dtype, part, blocks)

        codec = None
        if step.kind in POINT_TO_POINT:
            (route,) = self._legs(bind, shape, dtype)
            if self.wire is not None and dtype == torch.uint8 and (form := self.wire.format(kind)) is not None:
                route.codec, route.coded_bytes = CODECS[form.name], route.received  # it was coded by its owner
            return (route,)
        if self.wire is not None:
            whole = (shape[1], shape[0] * shape[2]) if blocks and step.kind == "reduce_scatter" else shape
            kind = kind or (KINDS.get(op[1], "") if len(op) > 1 else "")
            codec = self.codec(part_of(self.groups.grid, step, whole)[0], dtype, kind)
        if codec is not None:
            bare = [self._bound(step, op, phase, shape, codec.dtype, part, blocks) for _ in range(2)]
            return coded_routes(self, codec, step, bare, shape, blocks)
        return self._legs(bind, shape, dtype)

    def codec(self, part: Shape, dtype: torch.dtype, kind: str) -> Codec | None:
        """Return the codec by which a tensor of a kind travels in parts of a shape; None: as it is."""
        form = None if self.wire is None else self.wire.format(kind)
        if form is None or not dtype.is_floating_point or form.itemsize >= dtype.itemsize:
            return None
        return CODECS[form.name] if form.saves(part, dtype.itemsize) else None

    def keeps(self, route: Route) -> bool:
        """Return whether a gather's result is left in fp8: that of an operand of a product that multiplies in fp8."""
        if self.wire is None or self.wire.products != "fp8" or route.codec is None or route.kind != "all_gather":
            return False
        is_operand = len(route.op) > 1 and route.op[1] in OPERANDS
        return is_operand and route.codec.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)

    def _legs(self, bind: Callable[[], Route], shape: Shape, dtype: torch.dtype) -> tuple[Route, ...]:
        """The routes that `bind` makes of a step, one each time."""
        return (bind(),)

    def _route(
        self, step: Step, op: tuple[str, ...], phase: str, shape: Shape, dtype: torch.dtype, part: str, blocks: bool
    ) -> Route:
        route = self._bound(step, op, phase, shape, dtype, part, blocks)
        ranks, dim = self.groups.grid.size(step.axes), step.dim or 0
        if step.kind == "all_gather":
            route.begin = self._all_gather(route.channel, ranks, shape, dim, blocks)
        elif step.kind == "reduce_scatter":
            route.begin = self._reduce_scatter(route.channel, ranks, shape, dim, blocks)
        elif step.kind == "all_reduce":
            route.begin = self._all_reduce(route.channel)
        elif step.kind in POINT_TO_POINT:
            route.begin = self._point_to_point(route.channel, step.kind, ranks)
        else:
            route.begin = self._all_to_all(route.channel, ranks, shape, dim, step.source or 0)
        return route

    def _bound(
        self, step: Step, op: tuple[str, ...], phase: str, shape: Shape, dtype: torch.dtype, part: str, blocks: bool
    ) -> Route:
        """A route of which all is settled but how it begins."""
        if blocks and step.kind not in ("reduce_scatter", "all_gather"):
            raise ValueError(f"{step}: blocks of columns come of a gather, or go into a reduce-scatter")
        grid = self.groups.grid
        group = self.groups.group(step.axes, "gather" if step.kind == "all_gather" else "scatter")
        if blocks and step.kind == "reduce_scatter":  # they lie beside one another
            whole: Shape = (shape[1], shape[0] * shape[2])
        else:
            whole = shape
        ((_, after, received),) = apply(grid, (step,), whole)
        route = Route(step, op, phase, part, self.channel(group, Label(op, phase, step.kind, step.axes, part), dtype))
        route.received = received
        route.shape = (grid.size(step.axes), *shape) if blocks and step.kind == "all_gather" else after
        return route

    def make_room(self, route: Route, num_bytes: int) -> None:
        """Have room for what a route moves, where its bytes are not those of its shape."""

    def channel(self, group: ProcessGroup, label: Label, dtype: torch.dtype) -> Channel:
        """Whom what a label names reaches."""
        return Channel(group, self.groups.seats(label.axes))

    def _all_gather(self, to: Channel, ranks: int, shape: Shape, dim: int, blocks: bool) -> Begin:
        """Gather [.., s, ..] to [.., ranks * s, ..] at `dim`, or to [ranks, .., s, ..] with `blocks`."""
        if blocks or dim == 0:
            whole = (ranks, *shape) if blocks else (ranks * shape[0], *shape[1:])

            def begin(x: Tensor, out: Tensor | None) -> Started:
                x, copied = (x, ()) if x.is_contiguous() else copied_from(self.ring, x)
                gathered = x.new_empty(whole) if out is None else out
                landing = gathered.flatten(0, 1) if blocks else gathered
                return self._gather(landing, x, to), lambda: gathered, (x, gathered), copied

            return begin
        land = landing_of(self.ring, shape, dim, ranks)

        def begin_elsewhere(x: Tensor, out: Tensor | None) -> Started:
            x, copied = (x, ()) if x.is_contiguous() else copied_from(self.ring, x)
            landing, finish, landed = land(x, out)
            return self._gather(landing, x, to), finish, (x, landing), copied + landed

        return begin_elsewhere

    def _reduce_scatter(self, to: Channel, ranks: int, shape: Shape, dim: int, blocks: bool) -> Begin:
        """Reduce-scatter [.., ranks * s, ..], or [ranks, .., s, ..] with `blocks`, to [.., s, ..] at `dim`."""
        summed = shape[1:] if blocks else with_size(shape, dim, shape[dim] // ranks)
        parts = None if blocks or dim == 0 else (ranks, summed[dim])
        is_stacked = blocks or dim > 0
        reduce = self._reduce(to, ranks, summed)

        def begin(x: Tensor, out: Tensor | None) -> Started:
            if parts is not None:
                x = x.unflatten(dim, parts).movedim(dim, 0)
            x, copied = (x, ()) if x.is_contiguous() else copied_from(self.ring, x)
            work, finish, held, borrowed = reduce(x.flatten(0, 1) if is_stacked else x, out)
            return work, finish, held, borrowed + copied

        return begin

    def _reduce(self, to: Channel, ranks: int, shape: Shape) -> Begin:
        """Return how to add up block j of dim 0 of all ranks, of that shape, on rank j."""

        def begin(sent: Tensor, out: Tensor | None) -> Started:
            summed = sent.new_empty(shape) if out is None else out
            return self._scatter(summed, sent, to), lambda: summed, (sent, summed), ()

        return begin

    def _all_reduce(self, to: Channel) -> Begin:
        def begin(x: Tensor, out: Tensor | None) -> Started:
            if out is None:
                summed = x.clone(memory_format=torch.contiguous_format)
            else:
                summed = out if out is x else out.copy_(x)
            return self._sum_everywhere(summed, to), lambda: summed, (summed,), ()

        return begin

    def _all_to_all(self, to: Channel, ranks: int, shape: Shape, dim: int, source: int) -> Begin:
        """`dim` shrinks by `ranks`, `source` grows."""
        part = with_size(shape, dim, shape[dim] // ranks)
        land = landing_of(self.ring, part, source, ranks)

        def begin(x: Tensor, out: Tensor | None) -> Started:
            blocks = x.unflatten(dim, (ranks, part[dim])).movedim(dim, 0)
            blocks, copied = (blocks, ()) if blocks.is_contiguous() else copied_from(self.ring, blocks)
            landing, finish, landed = land(x, out)
            return self._exchange(landing, blocks.flatten(0, 1), to), finish, (blocks, landing), copied + landed

        return begin

    def _point_to_point(self, to: Channel, kind: str, ranks: int) -> Begin:
        """Send a shard to one rank, and receive that of another."""
        target = target_of(kind, to.me, ranks)
        source = next(rank for rank in range(ranks) if target_of(kind, rank, ranks) == to.me)

        def begin(x: Tensor, out: Tensor | None) -> Started:
            x, copied = (x, ()) if x.is_contiguous() else copied_from(self.ring, x)
            landing = x.new_empty(x.shape) if out is None else out
            nothing = x.new_empty(0)
            parts, landings = [nothing] * ranks, [nothing] * ranks
            parts[target], landings[source] = x.detach(), landing.detach()
            return self.exchange_parts(landings, parts, to), lambda: landing, (x, landing), copied

        return begin

    # ------------------------------------------------------------------- handing over to torch; a dry run sends nothing
    # Ranks are counted along the axes of the step here; where the process group has them in another order, torch is
    # given a list of parts in that order instead of one tensor of all parts.

    def _gather(self, landing: Tensor, x: Tensor, to: Channel) -> Underway | None:
        """Start to bring the `x` of all ranks together in `landing`, behind one another."""
        if to.seats is not None:
            landings = [real(part) for part in to.seated(landing.chunk(len(to.seats)))]
            return to.group.allgather([landings], [real(x)], _GATHER)
        return to.group._allgather_base(real(landing), real(x), _GATHER)

    def _exchange(self, landing: Tensor, blocks: Tensor, to: Channel) -> Underway | None:
        """Start to send block j of dim 0 to rank j, and to receive its block for this rank as block j of `landing`."""
        if to.seats is not None:
            return self.exchange_parts(landing.chunk(len(to.seats)), blocks.chunk(len(to.seats)), to)
        return to.group.alltoall_base(real(landing), real(blocks), [], [], _EXCHANGE)

    def exchange_parts(self, landings: Sequence[Tensor], parts: Sequence[Tensor], to: Channel) -> Underway | None:
        """Start to send `parts[j]` to rank j, and to receive `landings[j]` from it: of any sizes, contiguous."""
        return to.group.alltoall([real(x) for x in to.seated(landings)], [real(x) for x in to.seated(parts)])

    def _scatter(self, summed: Tensor, sent: Tensor, to: Channel) -> Underway | None:
        """Start to add up block j of all ranks' dim 0 in the `summed` of rank j."""
        if to.seats is not None:
            blocks = [real(part) for part in to.seated(sent.chunk(len(to.seats)))]
            return to.group.reduce_scatter([real(summed)], [blocks], _SCATTER)
        return to.group._reduce_scatter_base(real(summed), real(sent), _SCATTER)

    def _sum_everywhere(self, x: Tensor, to: Channel) -> Underway | None:
        """Start to add up the `x` of all ranks in place."""
        return to.group.allreduce([real(x)], _REDUCE)
