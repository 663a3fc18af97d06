"""`RowFlow`: who sends which rows to whom, given how many rows every rank has for every expert.  Pure.

A rank's rows lie sorted by expert.  They go to the ranks that have these experts (an all-to-all over the experts'
axes), are gathered over the axes over which the first product gathers rows, multiplied expert by expert, scattered and
gathered between the products, and go back the same way: every rank gets back the rows that it sent, in its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ndtp.algebra.expert_plan import ROWS, ExpertPlan, is_of_rows
from ndtp.algebra.grid import Grid
from ndtp.algebra.steps import Step, apply
from ndtp.algebra.volume import Traffic, Volume, traffic
from ndtp.dtypes import Dtype, name_of, size_of

Counts = Sequence[Sequence[int]]
BACK = {"all_to_all": "all_to_all", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


class RowMove(NamedTuple):
    """An all-to-all, all-gather or reduce-scatter of rows, of which every rank may have another number.

    Attributes:
        sends, receives: rows for, and from, each of the ranks along `axes`; a gather sends all to each, a
            reduce-scatter receives its own block from each.
        me: which of them this rank is.
    """

    kind: str
    axes: tuple[str, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    me: int

    @property
    def back(self) -> RowMove:
        """The way of the gradient."""
        return RowMove(BACK[self.kind], self.axes, self.receives, self.sends, self.me)

    @property
    def before(self) -> int:
        """Rows that this rank has."""
        return self.sends[self.me] if self.kind == "all_gather" else sum(self.sends)

    @property
    def after(self) -> int:
        """Rows that it has then."""
        return self.receives[self.me] if self.kind == "reduce_scatter" else sum(self.receives)

    @property
    def received(self) -> int:
        """Rows that come from others."""
        return sum(self.receives) - self.receives[self.me]


Moves = tuple[RowMove | Step, ...]


class RowWay(NamedTuple):
    """The collectives that move a tensor before or after a product, and those that move its gradient back."""

    there: Moves
    back: Moves


def even_split(size: int, parts: int) -> tuple[int, ...]:
    """Numbers that differ by one at most."""
    return tuple(size * (i + 1) // parts - size * i // parts for i in range(parts))


def chunk_counts(counts: Counts, chunk: int, chunks: int) -> list[list[int]]:
    """Return a chunk's share of the rows of every expert.

    Each chunk has a part of every expert's rows, so that it is a smaller layer.
    """
    return [[even_split(count, chunks)[chunk] for count in row] for row in counts]


def room_counts(plan: ExpertPlan, experts: int, room: int) -> Counts:
    """Return counts for which each rank along `plan.count_axes` sends `room` rows to each rank that has experts.

    A flow of these moves buffers of one size, whatever is in them; which of a rank's experts the rows are for is said
    elsewhere.
    """
    each = experts // plan.ranks
    row = [room if expert % each == 0 else 0 for expert in range(experts)]
    return [row] * plan.grid.size(plan.count_axes)


@dataclass(frozen=True, eq=False)
class RowFlow:
    """The moves of a rank's rows through a layer of experts.

    Args:
        plan: the products of the experts.
        rank: on the plan's grid.
        counts: for every position along `axes`, how many rows it has for each of all experts.
        axes: at least `plan.count_axes`, in the order that indexes `counts`.
        margin: rows that this rank has more, or less, than its even part where rows are scattered: of flows that bound
            others, which are rounded otherwise.
    """

    plan: ExpertPlan
    rank: int
    counts: Counts
    axes: tuple[str, ...]
    margin: int = 0

    def held_by(self, rank: int) -> Sequence[int]:
        return self.counts[self.plan.grid.index(rank, self.axes)]

    @property
    def experts(self) -> int:
        return len(self.counts[0])

    def _holders(self, rank: int, level: int) -> list[int]:
        """Return the ranks whose rows a rank has after the all-to-all and `level` gathers, in memory order."""
        if level == 0:
            return list(self.plan.grid.group(rank, self.plan.axes))
        peers = self.plan.grid.group(rank, self.plan.gathered[level - 1 : level])
        return [holder for peer in peers for holder in self._holders(peer, level - 1)]

    def _segments(self, rank: int, level: int) -> list[list[int]]:
        """Return the rows after `level` gathers: for each rank that brought rows, the rows for each expert, in
        memory order.
        """
        mine = self.plan.local_experts(self.experts, rank)  # those of all ranks along which rows are gathered
        return [list(self.held_by(holder)[mine.start : mine.stop]) for holder in self._holders(rank, level)]

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The ranks that brought rows to where the first product begins, as positions along `axes`, in memory order."""
        every = self._holders(self.rank, len(self.plan.gathered))
        return tuple(self.plan.grid.index(holder, self.axes) for holder in every)

    @cached_property
    def segments(self) -> list[list[int]]:
        """The rows where the first product begins, in memory order: [rank that brought them][expert of this rank]."""
        return self._segments(self.rank, len(self.plan.gathered))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each of this rank's experts where they are multiplied."""
        return tuple(map(sum, zip(*self.segments, strict=True)))

    @property
    def is_sorted(self) -> bool:
        """Whether rows arrive sorted by expert, so that no sorting is needed."""
        return len(self.segments) == 1 or len(self.sizes) == 1

    # ------------------------------------------------------------------------------------------------------- moves

    @cached_property
    def dispatch(self) -> RowMove:
        """Return the move of rows to the experts."""
        grid, plan, rank = self.plan.grid, self.plan, self.rank
        peers, mine = grid.group(rank, plan.axes), self.held_by(rank)
        theirs = [plan.local_experts(self.experts, peer) for peer in peers]
        sends = tuple(sum(mine[experts.start : experts.stop]) for experts in theirs)
        receives = tuple(map(sum, self._segments(rank, 0)))
        return RowMove("all_to_all", plan.axes, sends, receives, peers.index(rank))

    @property
    def combine(self) -> RowMove:
        """Return the move of rows from the experts back to their tokens."""
        return self.dispatch.back

    @cached_property
    def _splits(self) -> dict[str, tuple[int, ...]]:
        """Axis -> the rows of each rank along it, between a gather and its scatter, or the other way round."""
        plan, grid = self.plan, self.plan.grid
        found: dict[str, tuple[int, ...]] = {}
        for level, axis in enumerate(plan.gathered):
            peers = grid.group(self.rank, (axis,))
            found[axis] = tuple(sum(map(sum, self._segments(peer, level))) for peer in peers)
        rows = sum(self.sizes)
        for step in plan.up.relayouts["C"]:
            for axis in step.axes if is_of_rows(step) else ():
                me = grid.coordinate(self.rank)[axis]
                if axis not in found:
                    found[axis] = self._scattered(rows, grid[axis], me)
                rows = found[axis][me]
        return found

    def _scattered(self, rows: int, parts: int, me: int) -> tuple[int, ...]:
        sizes = even_split(rows, parts)
        if not self.margin:
            return sizes
        mine = min(max(sizes[me] + self.margin, 0), rows)
        return tuple(mine if i == me else (rows - mine) * (i == (me + 1) % parts) for i in range(parts))

    @cached_property
    def ways(self) -> tuple[RowWay, RowWay, RowWay, RowWay]:
        """The moves of the first product's input and output, and of the second product's input and output."""
        return tuple(  # type: ignore[return-value]
            RowWay(*(tuple(map(self._bound, plan.relayouts[name])) for name in (there, back)))
            for plan in (self.plan.up, self.plan.down)
            for there, back in (("A", "dA"), ("C", "dC"))
        )

    def _bound(self, step: Step) -> RowMove | Step:
        if not is_of_rows(step):
            return Step(step.kind, step.axes, None if step.dim is None else step.dim - ROWS)
        (axis,) = step.axes
        sizes, me = self._splits[axis], self.plan.grid.coordinate(self.rank)[axis]
        own = (sizes[me],) * len(sizes)
        if step.kind == "all_gather":
            return RowMove("all_gather", step.axes, own, sizes, me)
        return RowMove("reduce_scatter", step.axes, sizes, own, me)

    # ------------------------------------------------------------------------------------------------------- volume

    def volume(
        self,
        hidden: int,
        inner: int,
        width: int = 1,
        grads: Sequence[bool] = (True, True, True),
        dtype: Dtype = "float32",
    ) -> Volume:
        """The exact traffic of the rows, in bytes that this rank receives.

        Args:
            width: features of the first product for each that the activation leaves.
            grads: whether gradients go back into the tokens, into the first product, and into the second.
            dtype: of the rows.
        """
        grid, plan = self.plan.grid, self.plan
        outside, inside = hidden // grid.size(plan.features), inner // grid.size(plan.down.a.dims[2])
        exchanges = [("forward", self.dispatch), ("forward", self.combine)]
        exchanges += [("dgrad", self.dispatch.back)] * grads[0] + [("dgrad", self.combine.back)] * any(grads)
        entries = [_of_rows(phase, move, outside, dtype) for phase, move in exchanges]
        entering, leaving, again, last = self.ways
        rows, split = self.dispatch.after, sum(self.sizes)
        held_in = hidden // grid.size(plan.up.need(plan.up.a_letters)[2])
        held = width * inner // grid.size(plan.up.need(plan.up.c_letters)[2])
        held_again = inner // grid.size(plan.down.need(plan.down.a_letters)[2])
        held_out = hidden // grid.size(plan.down.need(plan.down.c_letters)[2])
        between = self._between
        shapes = (
            (entering, (rows, outside), (split, held_in), grads[0]),
            (leaving, (split, held), (between, width * inside), grads[0] or grads[1]),
            (again, (between, inside), (split, held_again), grads[0] or grads[1]),
            (last, (split, held_out), (rows, outside), any(grads)),
        )
        for way, before, after, wanted in shapes:
            entries += _traffic(grid, way.there, before, "forward", dtype)
            entries += _traffic(grid, way.back, after, "dgrad", dtype) if wanted else []
        return Volume.of(entries)

    @property
    def _between(self) -> int:
        """Rows between the two products."""
        rows = sum(self.sizes)
        for move in self.ways[1].there:
            rows = move.after if isinstance(move, RowMove) else rows
        return rows


def _of_rows(phase: str, move: RowMove, width: int, dtype: Dtype) -> Traffic:
    count = move.received * width
    return Traffic(phase, move.kind, move.axes, count * size_of(dtype), count, dtype=name_of(dtype))


def _traffic(grid: Grid, moves: Moves, shape: tuple[int, int], phase: str, dtype: Dtype) -> Iterator[Traffic]:
    for move in moves:
        if isinstance(move, RowMove):
            yield _of_rows(phase, move, shape[1], dtype)
            shape = move.after, shape[1]
        elif move.kind != "slice":
            yield from traffic(grid, (move,), shape, phase, "", dtype)
            ((_, shape, _),) = apply(grid, (move,), shape)  # type: ignore[assignment]


def sorting_index(segments: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of each segment of rows, in the order of the experts."""
    flat = [count for segment in segments for count in segment]
    starts = [0, *accumulate(flat)]
    each = len(segments[0])
    for expert in range(each):
        for holder in range(len(segments)):
            place = holder * each + expert
            yield starts[place], flat[place]
