"""Collectives with handles.  One class a backend; every byte of a product passes through `Collectives.launch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions

from ndtp.algebra.steps import Step, apply
from ndtp.collectives.direct_exchange import Exchange, Past, announce, exchange, past_of, purpose_of
from ndtp.collectives.handles import Begin, Channel, Handle, Relay, Route, Shape, Started
from ndtp.collectives.in_line import LOW_PRECISION, check_out, copied_from, landing_of, real, summed_up, with_size
from ndtp.collectives.labels import Label
from ndtp.collectives.presence import flight_of_world
from ndtp.collectives.recorder import Recording, observed
from ndtp.collectives.watch import Watch, failure

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.buffer_ring import BufferRing

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
        in_flight: the number of handles that were started and are neither waited for nor dropped.
    """

    orders_by_stream = True  # waiting blocks a stream, not the host
    arrives_in_parts = False  # a gather tells which of its parts have come, see `Handle.arriving`

    def __init__(self, groups: AxisGroups, ring: BufferRing, recording: Recording) -> None:
        # None of these holds the process grid: a grid goes when nobody needs it, not when garbage is collected.
        self.groups, self.ring, self.recording = groups, ring, recording
        self.describe = groups.describe
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

    def _launch_watched(self, route: Route, tensor: Tensor, out: Tensor | None, ahead: bool) -> Handle:
        """`launch` where a meter counts, or a profiler or recorder looks on."""
        label, begin, recorder = route.label(), route.begin, self.recording.recorder
        if ahead:
            label.ahead = route.received * tensor.element_size()
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
    ) -> tuple[Route, ...]:
        """Bind a collective step to tensors of one shape: one route, or two, of which the second goes on.

        Args:
            step: anything but a slice.
            op: what errors and profiles call it, such as ("matmul", "A").
            phase: "forward", "dgrad" or "wgrad".
            part: which chunk of how many, such as "2/4".
            blocks: the gathered matrix stays, or the scattered one comes, as blocks of columns [p, rows, columns / p].
        """

        def bind() -> Route:
            return self._route(step, op, phase, shape, dtype, part, blocks)

        return self._legs(bind, shape, dtype)

    def _legs(self, bind: Callable[[], Route], shape: Shape, dtype: torch.dtype) -> tuple[Route, ...]:
        """The routes that `bind` makes of a step, one each time."""
        return (bind(),)

    def _route(
        self, step: Step, op: tuple[str, ...], phase: str, shape: Shape, dtype: torch.dtype, part: str, blocks: bool
    ) -> Route:
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
        ranks, dim = grid.size(step.axes), step.dim or 0
        route.shape = (ranks, *shape) if blocks and step.kind == "all_gather" else after
        if step.kind == "all_gather":
            route.begin = self._all_gather(route.channel, ranks, shape, dim, blocks)
        elif step.kind == "reduce_scatter":
            route.begin = self._reduce_scatter(route.channel, ranks, shape, dim, blocks)
        elif step.kind == "all_reduce":
            route.begin = self._all_reduce(route.channel)
        else:
            route.begin = self._all_to_all(route.channel, ranks, shape, dim, step.source or 0)
        return route

    def channel(self, group: ProcessGroup, label: Label, dtype: torch.dtype) -> Channel:
        """Whom what a label names reaches."""
        return Channel(group)

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
            summed = x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)
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

    # ------------------------------------------------------------------- handing over to torch; a dry run sends nothing

    def _gather(self, landing: Tensor, x: Tensor, to: Channel) -> Any:
        """Start to bring the `x` of all ranks together in `landing`, behind one another."""
        return to.group._allgather_base(real(landing), real(x), _GATHER)

    def _exchange(self, landing: Tensor, blocks: Tensor, to: Channel) -> Any:
        """Start to send block j of dim 0 to rank j, and to receive its block for this rank as block j of `landing`."""
        return to.group.alltoall_base(real(landing), real(blocks), [], [], _EXCHANGE)

    def exchange_parts(self, landings: Sequence[Tensor], parts: Sequence[Tensor], to: Channel) -> Any:
        """Start to send `parts[j]` to rank j, and to receive `landings[j]` from it: of any sizes, contiguous."""
        return to.group.alltoall(list(map(real, landings)), list(map(real, parts)))

    def _scatter(self, summed: Tensor, sent: Tensor, to: Channel) -> Any:
        """Start to add up block j of all ranks' dim 0 in the `summed` of rank j."""
        return to.group._reduce_scatter_base(real(summed), real(sent), _SCATTER)

    def _sum_everywhere(self, x: Tensor, to: Channel) -> Any:
        """Start to add up the `x` of all ranks in place."""
        return to.group.allreduce([real(x)], _REDUCE)


class GlooCollectives(Collectives):
    """gloo: reductions that sum in fp32, and a reduce-scatter at half the bytes of gloo's own.

    gloo's reduce-scatter is an all-reduce inside (twice the bytes), and its bf16 sums round at every hop.

    All but an all-reduce of full precision over more than two ranks are exchanges, whose messages say what they are
    for; that one is announced by empty ones that do.
    """

    orders_by_stream = False

    def _finish_given_up(self, past: Past) -> None:
        while past.given_up:
            watch, work, _ = past.given_up.pop()
            with watch:
                work.wait()

    def channel(self, group: ProcessGroup, label: Label, dtype: torch.dtype) -> Channel:
        return Channel(group, past_of(group), purpose_of(label, dtype))

    def _legs(self, bind: Callable[[], Route], shape: Shape, dtype: torch.dtype) -> tuple[Route, ...]:
        """An all-reduce in low precision is a reduce-scatter and an all-gather."""
        route, count = bind(), math.prod(shape)
        if route.kind != "all_reduce":
            return (route,)
        ranks = self.groups.grid.size(route.axes)
        if ranks == 2 and count % 2 == 0:  # of an odd number, parts are counted as rounded up
            route.begin = self._swap(route.channel, shape, count)
            return (route,)
        if self.sums_everywhere(dtype):
            return (route,)
        # Of the flat tensor, padded: the same volume.
        padded = count + -count % ranks
        gather = bind()
        to, reduce = gather.channel, self._reduce(route.channel, ranks, (padded // ranks,))
        route.shape, gather.follows = (padded // ranks,), True

        def begin(x: Tensor, out: Tensor | None) -> Started:
            flat = self.ring.borrow((padded,), x)
            flat[:count].view(shape).copy_(x.detach())
            flat[count:].zero_()
            work, finish, held, borrowed = reduce(flat, None)
            return work, finish, held, (flat, *borrowed)

        def begin_gather(x: Tensor, out: Tensor | None) -> Started:
            gathered = x.new_empty((padded,))

            def finish() -> Tensor:
                summed = gathered[:count].view(shape)
                return summed if out is None else out.copy_(summed)

            return self._gather(gathered, x, to), finish, (x, gathered), ()

        route.begin, gather.begin = begin, begin_gather
        return route, gather

    def sums_everywhere(self, dtype: torch.dtype) -> bool:
        """Return whether an all-reduce of more than two ranks is left to `_sum_everywhere`."""
        return dtype not in LOW_PRECISION

    def _swap(self, to: Channel, shape: Shape, count: int) -> Begin:
        """An all-reduce of two ranks: each sends all that it has, as many bytes as by halves, and nobody waits twice.

        Of 1 KiB it took 262 us, where gloo's own took 397; of 4 MiB 12 ms, where that took 22.
        """
        me = to.group.rank()

        def begin(x: Tensor, out: Tensor | None) -> Started:
            both = self.ring.borrow((2, count), x)
            own = both[me]
            own.view(shape).copy_(x.detach())
            work = self._gather(both, own, to, False)

            def finish() -> Tensor:
                return summed_up(both, None if out is None else out.view(-1)).view(shape)

            return work, finish, (both,), (both,)

        return begin

    def _gather(self, landing: Tensor, x: Tensor, to: Channel, own: bool = True) -> Any:
        ranks = to.group.size()
        landings = landing.detach().view(ranks, *x.shape).unbind()
        return exchange(to.group, [x.detach()] * ranks, landings, to.purpose, own=own)

    def _exchange(self, landing: Tensor, blocks: Tensor, to: Channel, own: bool = True) -> Any:
        """`own`: whether this rank's block must be in `landing`, too."""
        ranks = to.group.size()
        sent, received = (x.detach().view(ranks, x.numel() // ranks).unbind() for x in (blocks, landing))
        return exchange(to.group, sent, received, to.purpose, own=own)

    def exchange_parts(self, landings: Sequence[Tensor], parts: Sequence[Tensor], to: Channel) -> Any:
        return exchange(to.group, parts, landings, to.purpose, empties=False)

    def _sum_everywhere(self, x: Tensor, to: Channel) -> Any:
        return Exchange([*announce(to.group, x, to.purpose), super()._sum_everywhere(x, to)])

    def _swap_blocks(self, landing: Tensor, blocks: Tensor, to: Channel) -> Any:
        """Start to send the other of two ranks its block, and to receive this rank's block in `landing`."""
        me, nothing = to.group.rank(), blocks.new_empty(0)
        landings = [nothing, landing.detach()] if me == 0 else [landing.detach(), nothing]
        return exchange(to.group, blocks.unbind(), landings, to.purpose, own=False)

    def _reduce(self, to: Channel, ranks: int, shape: Shape) -> Begin:
        return self._reduce_pair(to, shape) if ranks == 2 else self._reduce_all(to, ranks, shape)

    def _reduce_all(self, to: Channel, ranks: int, shape: Shape) -> Begin:
        def begin(sent: Tensor, out: Tensor | None) -> Started:
            received = self.ring.borrow(sent.shape, sent)
            work = self._exchange(received, sent, to)
            return work, lambda: summed_up(received.view(ranks, *shape), out), (sent, received), (received,)

        return begin

    def _reduce_pair(self, to: Channel, shape: Shape) -> Begin:
        """Add two ranks' blocks: the other's arrives where the sum is wanted, and this rank's is added to it."""
        me = to.group.rank()

        def begin(sent: Tensor, out: Tensor | None) -> Started:
            summed, blocks = sent.new_empty(shape) if out is None else out, sent.detach().view(2, *shape)
            return self._swap_blocks(summed, blocks, to), lambda: summed.add_(blocks[me]), (sent, summed), ()

        return begin
