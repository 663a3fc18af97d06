"""Recorded programs of all ranks on multiprocessors that are given out as badly as a device may give them.

A kernel of NCCL holds its multiprocessors until its peers have come, and a device starts thread blocks of different
streams in any order.  So ranks that issue alike may start unlike, and wait for each other for ever: unless what can be
outstanding fits on the device together, or NCCL keeps the order of issue.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

Members = tuple[int, ...]
Communicator = tuple[Members, int]  # its ranks, and which of those of the same ranks


class Operation(NamedTuple):
    """One operation of a rank, as `RecordedCuda(record=True)` notes it.

    Attributes:
        lane, number: its place, as later operations name it.
        name: of the kernel or collective.
        before: lane -> the last operation there that must be done first.
        members: the ranks of its communicator; None: a kernel of this rank alone.
        read_bytes, written_bytes: of its tensors.
    """

    lane: int
    number: int
    name: str
    before: dict[int, int]
    members: Members | None = None
    read_bytes: int = 0
    written_bytes: int = 0


class _Call(NamedTuple):
    """The operation of a rank, with the communicator and its number there, by which ranks find each other's."""

    operation: Operation
    call: tuple[Communicator, int] | None


class _Rank:
    """The state of one rank's device.

    Attributes:
        done: lane -> the number of the last operation that is done.
        held: collectives that are started, and the thread blocks that they have.
        issued: collectives that have not all of theirs, in the order of issue.
    """

    def __init__(self, calls: Sequence[_Call], free: int) -> None:
        self.free, self.left = free, len(calls)
        self.done: dict[int, int] = {}
        self.held: dict[tuple[Communicator, int], int] = {}
        self.issued = deque(each for each in calls if each.call is not None)
        self._lanes: dict[int, deque[_Call]] = defaultdict(deque)
        for each in calls:
            self._lanes[each.operation.lane].append(each)

    def ready(self) -> list[_Call]:
        """Return the first operation of each lane that may start, by the order of streams and events."""
        heads = [lane[0] for lane in self._lanes.values() if lane]
        return [
            each
            for each in heads
            if all(self.done.get(lane, 0) >= number for lane, number in each.operation.before.items())
        ]

    def finish(self, each: _Call) -> None:
        self._lanes[each.operation.lane].popleft()
        self.done[each.operation.lane] = each.operation.number
        self.left -= 1

    def end(self, call: tuple[Communicator, int]) -> None:
        """A collective that all ranks have started is done."""
        self.free += self.held.pop(call, 0)
        each = next(lane[0] for lane in self._lanes.values() if lane and lane[0].call == call)
        self.finish(each)
        if each in self.issued:
            self.issued.remove(each)


def _calls(program: Sequence[Operation]) -> list[_Call]:
    """Name the collectives of a program, so that all members of a communicator name them alike."""
    names: dict[int, Communicator] = {}
    alike: dict[Members, int] = defaultdict(int)
    counts: dict[int, int] = defaultdict(int)
    calls = []
    for operation in program:
        call = None
        if operation.members is not None and len(operation.members) > 1:
            if operation.lane not in names:
                names[operation.lane] = operation.members, alike[operation.members]
                alike[operation.members] += 1
            call = names[operation.lane], counts[operation.lane]
            counts[operation.lane] += 1
        calls.append(_Call(operation, call))
    return calls


def find_deadlock(
    programs: Sequence[Sequence[Operation]],
    multiprocessors: int,
    ctas: int,
    *,
    in_order: bool = False,
    seeds: Sequence[int] = range(20),
) -> str | None:
    """Dispatch the programs of all ranks in adverse orders, and return how they came to stand still, or None.

    A kernel of a rank's own runs whenever one multiprocessor is free, and is done.  A collective takes `ctas`
    multiprocessors, one by one, and holds what it has until all of its ranks have all of theirs.  All ranks compute as
    far as they get first, so that as many collectives as can be are outstanding.

    Args:
        programs: of every rank, as `RecordedCuda(record=True).trace` has them.
        multiprocessors: of each device.
        ctas: thread blocks of a collective (`max_ctas`).
        in_order: a collective starts when all that were issued before it have started, on each rank, as NCCL does with
            NCCL_LAUNCH_ORDER_IMPLICIT=1.
        seeds: of the orders that are tried.
    """
    if ctas > multiprocessors:
        return f"a collective of {ctas} thread blocks never fits on {multiprocessors} multiprocessors"
    calls = [_calls(program) for program in programs]
    found = (_dispatched(calls, multiprocessors, ctas, in_order, random.Random(seed)) for seed in seeds)
    return next((each for each in found if each is not None), None)


def _dispatched(
    calls: Sequence[Sequence[_Call]], multiprocessors: int, ctas: int, in_order: bool, draw: random.Random
) -> str | None:
    ranks = [_Rank(each, multiprocessors) for each in calls]
    while any(rank.left for rank in ranks):
        if sum(map(_compute, ranks)):
            continue  # as far as all ranks get without a collective: so many of these as can be are outstanding
        if not in_order and draw.random() < 0.5 and _let_through(ranks, ctas, draw):
            continue
        # Each rank prefers communicators in an order of its own, and takes them one by one, or all by turns.
        favours: list[dict[object, float]] = [defaultdict(draw.random) for _ in ranks]
        by_turns = draw.random() < 0.5
        moved = [_start(rank, favour, ctas, in_order, by_turns) for rank, favour in zip(ranks, favours, strict=True)]
        if not (_complete(ranks, ctas) or any(moved)):
            return "\n".join(_standing(i, rank, ctas) for i, rank in enumerate(ranks) if rank.left)
    return None


def _compute(rank: _Rank) -> bool:
    """Run the kernels of a rank's own that can go on."""
    ready = [each for each in rank.ready() if each.call is None] if rank.free else []
    for each in ready:
        rank.finish(each)
    return bool(ready)


def _let_through(ranks: Sequence[_Rank], ctas: int, draw: random.Random) -> bool:
    """Let one collective pass that all of its ranks can start now, and return whether there is one."""
    ready = [{each.call for each in rank.ready() if each.call is not None} for rank in ranks]
    able = [
        call
        for call in sorted(set().union(*ready))
        if all(call in ready[m] and ranks[m].free + ranks[m].held.get(call, 0) >= ctas for m in call[0][0])
    ]
    if able:
        call = draw.choice(able)
        for member in call[0][0]:
            ranks[member].free -= ctas - ranks[member].held.get(call, 0)
            ranks[member].held[call] = ctas
            ranks[member].end(call)
    return bool(able)


def _start(rank: _Rank, favour: dict[object, float], ctas: int, in_order: bool, by_turns: bool) -> bool:
    """Start collectives in the order in which the adversary prefers them, as far as there is room.

    Args:
        by_turns: their thread blocks come by turns, so that none has all of its own while there is no room for all.
    """
    collectives = [each for each in rank.ready() if each.call is not None]
    if in_order:  # those behind the first one that has not all of its thread blocks wait for it
        while rank.issued and rank.held.get(rank.issued[0].call, 0) == ctas:  # type: ignore[arg-type]
            rank.issued.popleft()
        collectives = [each for each in collectives if rank.issued and each is rank.issued[0]]
    moved, most = False, -(-rank.free // len(collectives)) if by_turns and collectives else ctas
    for each in sorted(collectives, key=lambda each: favour[each.call and each.call[0]]):
        assert each.call is not None
        has = rank.held.get(each.call, 0)
        take = min(ctas - has, rank.free, most)
        if take:
            rank.held[each.call], moved = has + take, True
            rank.free -= take
    return moved


def _complete(ranks: Sequence[_Rank], ctas: int) -> bool:
    """Let collectives end of which all ranks have all thread blocks."""
    started = {call for rank in ranks for call, has in rank.held.items() if has == ctas}
    ended = [call for call in started if all(ranks[member].held.get(call) == ctas for member in call[0][0])]
    for call in ended:
        for member in call[0][0]:
            ranks[member].end(call)
    return bool(ended)


def _standing(number: int, rank: _Rank, ctas: int) -> str:
    held = ", ".join(f"{call[1]} of ranks {call[0][0]} ({has} of {ctas})" for call, has in rank.held.items())
    return f"rank {number}: {rank.free} multiprocessors are free; collectives hold the others: {held or 'none'}"
