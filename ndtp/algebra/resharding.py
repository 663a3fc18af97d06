"""`ReshardPlan`: who sends what to whom, so that a tensor lies as another layout says, on any grid.  Pure.

A layout gives every rank of its grid a block, a box of the tensor.  What a rank lacks of its new block it receives,
each element once; what it holds already, as one of several replicas too, it does not.  The two grids may have the same
ranks, or others: a rank that is on the target's alone holds nothing before, and receives all of its block.  No way of
moving a tensor takes fewer bytes, for any rank.  Which of several replicas sends is a choice: the next largest part
goes to the one that has sent least so far (Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of
the least load of the busiest sender).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from ndtp.algebra.cached import cached_property
from ndtp.algebra.layout import Layout
from ndtp.algebra.volume import Traffic, Volume
from ndtp.dtypes import Dtype, name_of, size_of
from ndtp.errors import GridError, LayoutError

Box = tuple[tuple[int, int], ...]  # for each dim where it starts and stops


class Message(NamedTuple):
    """A message from one rank to another; ranks are numbered as in the plan, and the box lies in the plan's frame."""

    sender: int
    receiver: int
    box: Box

    @property
    def elements(self) -> int:
        return volume_of(self.box)


def volume_of(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


@dataclass(frozen=True)
class ReshardPlan:
    """The moves of a tensor from the layout `source` to the layout `target`, which may lie on different grids.

    Sizes need not divide: blocks are those of `Layout.slices(..., uneven=True)`.

    Args:
        shape: the global shape of what lies as `source`.
        target_shape: that of what lies as `target`; default: the same.
        start, target_start: where the two begin in a frame that they share; default: both at its origin.  A slice is a
            target that is smaller and starts later; what a larger target has beyond the source is filled with zeros.
        ranks: what the plan calls the ranks of the source's grid, in its order; default: 0, 1, ...
        target_ranks: the same of the target's grid.  A rank that is on both grids has one name.  Default: as `ranks`.
        name: what errors and profiles call it.
        end: where in the frame the tensor ends, if padding lies behind: no block goes further, and none of that moves.

    Raises:
        GridError: `ranks` or `target_ranks` that are not as many as their grid has, each once.
        LayoutError: layouts or shapes of different numbers of dims.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    target_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] = ()
    target_start: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    target_ranks: tuple[int, ...] | None = None
    name: str = "reshard"
    end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        one, other, where = self.source.grid, self.target.grid, f"reshard '{self.name}'"
        if one.num_ranks != other.num_ranks and self.target_ranks is None:
            raise GridError(
                f"{where}: grid {one} has {one.num_ranks} ranks and grid {other} {other.num_ranks}; a tensor moves "
                "between grids of the same ranks\n  fix: a grid of as many, in which axes of their own replicate, or "
                "name the ranks of both by ranks= and target_ranks="
            )
        for grid, ranks in ((one, self.ids), (other, self.target_ids)):
            if len(set(ranks)) != grid.num_ranks or len(ranks) != grid.num_ranks:
                raise GridError(
                    f"{where}: grid {grid} has {grid.num_ranks} ranks, which are named {', '.join(map(str, ranks))}\n"
                    "  fix: a name for each, all different"
                )
        lengths = {len(x) for x in (self.shape, self.target_shape, self.start, self.target_start, self.end) if x}
        if self.source.ndim != self.target.ndim or lengths - {self.source.ndim}:
            raise LayoutError(
                f"{where}: from {self.source} to {self.target} for shape {self.shape}"
                + (f" to {self.target_shape}" if self.target_shape else "")
                + "; give layouts and shapes of one number of dims"
            )

    @cached_property
    def back(self) -> ReshardPlan:
        """The way of the gradient: every replica gets all of it, as of any tensor."""
        ranks, target_ranks = (self.ranks, None) if self.target_ranks is None else (self.target_ranks, self.ids)
        return ReshardPlan(
            self.target, self.source, self.end_shape, self.shape, self.target_start, self.start,
            ranks, target_ranks, self.name, self.end,
        )  # fmt: skip

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The ranks of the source's grid, as the plan names them."""
        return tuple(range(self.source.grid.num_ranks)) if self.ranks is None else self.ranks

    @cached_property
    def target_ids(self) -> tuple[int, ...]:
        """The ranks of the target's grid."""
        return self.ids if self.target_ranks is None else self.target_ranks

    @property
    def end_shape(self) -> tuple[int, ...]:
        """The global shape of the result."""
        return self.shape if self.target_shape is None else self.target_shape

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes, of the source's grid, that span all of its ranks: the exchange goes over them."""
        return self.source.grid.nontrivial(self.source.grid.names)

    # -------------------------------------------------------------------------------------------------------- blocks

    def held(self, rank: int) -> Box | None:
        """Return the box of a rank's shard before the move, in the frame; None for a rank outside the source's grid."""
        return self._boxes[0].get(rank)

    def wanted(self, rank: int) -> Box | None:
        """Return the box of a rank's shard after the move, in the frame; None for a rank outside the target's grid."""
        return self._boxes[1].get(rank)

    def kept(self, rank: int) -> Box | None:
        """Return the box that a rank already has of its new shard."""
        held, wanted = self.held(rank), self.wanted(rank)
        return None if held is None or wanted is None else overlap(held, wanted)

    @cached_property
    def _boxes(self) -> tuple[dict[int, Box], dict[int, Box]]:
        """The boxes that every rank holds before the move, and those that it wants after the move."""
        sides = (self.source, self.shape, self.start, self.ids), (
            self.target, self.end_shape, self.target_start, self.target_ids
        )  # fmt: skip
        held, wanted = (
            {rank: _box(layout, seat, shape, start, self.end) for seat, rank in enumerate(ids)}
            for layout, shape, start, ids in sides
        )
        return held, wanted

    @cached_property
    def _replicas(self) -> dict[Box, tuple[int, ...]]:
        """Blocks of the source -> the ranks that hold them.  They share no element."""
        return _ranks_by_block(self._boxes[0])

    @cached_property
    def _takers(self) -> dict[Box, tuple[int, ...]]:
        """Blocks of the target -> the ranks that want them."""
        return _ranks_by_block(self._boxes[1])

    @cached_property
    def _by_sender(self) -> dict[Box, tuple[Message, ...]]:
        return {}

    def _messages_from(self, block: Box) -> tuple[Message, ...]:
        """Everything that the replicas of a block send; a rank holds one block, so blocks are independent."""
        if block not in self._by_sender:
            senders = self._replicas[block]
            load = dict.fromkeys(senders, 0)
            parts = [
                (volume_of(part), taker, part)
                for other in _meeting(block, self._cuts[1])
                if (part := overlap(block, other)) is not None
                for taker in self._takers[other]
                if taker not in load
            ]
            found = []
            for elements, taker, part in sorted(parts, key=lambda entry: (-entry[0], entry[1])):
                # Of those that have sent least, the nearest: neighbours in rank order share a node.
                sender = min(senders, key=lambda rank: (load[rank], abs(rank - taker), rank))
                load[sender] += elements
                found.append(Message(sender, taker, part))
            self._by_sender[block] = tuple(found)
        return self._by_sender[block]

    @cached_property
    def _cuts(self) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]:
        """The starts and stops of the blocks of source and target, for each dim."""
        source, target = (
            [sorted({box[dim] for box in boxes}) for dim in range(self.source.ndim)]
            for boxes in (self._replicas, self._takers)
        )
        return source, target

    # ------------------------------------------------------------------------------------------------------ messages

    def sends(self, rank: int) -> tuple[Message, ...]:
        """Return the messages that a rank sends, at most one to each receiver, in the order of the receivers."""
        block = self.held(rank)
        found = self._messages_from(block) if block is not None and volume_of(block) else ()
        return tuple(sorted((m for m in found if m.sender == rank), key=lambda message: message.receiver))

    def receives(self, rank: int) -> tuple[Message, ...]:
        """Return the messages that a rank receives, at most one from each sender, in the order of the senders."""
        block = self.wanted(rank)
        sources = _meeting(block, self._cuts[0]) if block is not None and volume_of(block) else ()
        found = (m for source in sources for m in self._messages_from(source) if m.receiver == rank)
        return tuple(sorted(found))

    @property
    def messages(self) -> Iterator[Message]:
        for block in self._replicas:
            yield from self._messages_from(block)

    @cached_property
    def is_local(self) -> bool:
        """Whether every rank already holds all that it wants."""
        return next(self.messages, None) is None

    def received(self, rank: int) -> int:
        """Elements, exactly: what the rank lacks of its new block."""
        return sum(message.elements for message in self.receives(rank))

    def sent(self, rank: int) -> int:
        return sum(message.elements for message in self.sends(rank))

    @cached_property
    def busiest(self) -> int:
        """The most elements that any rank receives."""
        return max(map(self.received, self.target_ids))

    def volume(self, rank: int, dgrad: bool = True, dtype: Dtype = "float32") -> Volume:
        """The exact traffic, in bytes that `rank` received; ranks may differ.

        Args:
            dgrad: whether the gradient is wanted, which goes back.
            dtype: of the tensor.
        """
        ways = [("forward", self), ("dgrad", self.back)][: 1 + dgrad]
        return Volume.of(way.traffic(phase, "all_to_all", rank, dtype) for phase, way in ways)

    def traffic(self, phase: str, collective: str, rank: int, dtype: Dtype) -> Traffic:
        """Return the traffic of a tensor of a dtype, one way, that `rank` receives."""
        count = self.received(rank)
        return Traffic(phase, collective, self.axes, count * size_of(dtype), count, self.name, name_of(dtype))

    def __str__(self) -> str:
        return f"from {self.source} on grid {self.source.grid} to {self.target} on grid {self.target.grid}"


def _box(layout: Layout, rank: int, shape: Sequence[int], start: Sequence[int], end: Sequence[int]) -> Box:
    origin = start or (0,) * len(shape)
    slices = layout.slices(rank, shape, uneven=True)
    box = tuple((at + s.start, at + s.stop) for at, s in zip(origin, slices, strict=True))
    return tuple((min(a, last), min(b, last)) for (a, b), last in zip(box, end, strict=True)) if end else box


def _ranks_by_block(boxes: Mapping[int, Box]) -> dict[Box, tuple[int, ...]]:
    found: dict[Box, list[int]] = {}
    for rank, box in sorted(boxes.items()):
        if volume_of(box):
            found.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in found.items()}


def _meeting(box: Box, cuts: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Box]:
    """The blocks between `cuts` that share something with a box: in every dim the intervals that do."""
    found = []
    for (start, stop), intervals in zip(box, cuts, strict=True):
        first = max(bisect_right(intervals, (start, stop)) - 1, 0)
        met = []
        for interval in intervals[first:]:
            if interval[0] >= stop:
                break
            if interval[1] > start:
                met.append(interval)
        found.append(met)
    yield from product(*found)
