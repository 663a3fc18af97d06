"""The protocol of an exchange, as data: what every rank does, in order, and whom it waits for. Pure.

A window is memory of every rank that its peers read, cut into `SLOTS`; exchanges of a group take them in turns.  In an
exchange a rank stages what it sends in its own window, and pulls what it receives out of its peers': nobody writes into
memory of another, but for signals.  There are two kinds of those, a pair of ranks and a slot each, put by the one and
taken by the other, in turns:

    ready   from the owner of a window to its peer: what is for you lies in the slot
    free    back: I have pulled it, the slot may be filled again; at the beginning every slot is free

Rank r pulls from r + 1 first, then from r + 2, and stages for r - 1 first, which pulls from it first: no rank is read
by two at a time, and what is pulled first is staged first.

A product that takes gathered rows multiplies them in the order in which they arrive, its own first (`arrivals`); one
whose rows are scattered computes them in the order in which they are pulled, its own last (`departures`).

Signals of a pair alternate, each has one rank that puts it and one that takes it, and programs have no branches: what a
rank can do next it can still do after whatever another does first.  So all interleavings take the same steps, and what
comes before what is one order for all of them.  `tests/collectives/test_symmetric_protocol.py` checks that order.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

SLOTS = 2  # one is filled while peers still pull out of the other


class Do(str, Enum):
    """The kinds of action of a rank towards a peer in an exchange."""

    WAIT_FREE = "wait free"  # until the peer has pulled what the slot held for it
    STAGE = "stage"  # what it sends: the peer's part, or all of it, of which the peer is this rank itself
    PUT_READY = "put ready"
    KEEP = "keep"  # its own part, which needs no window
    WAIT_READY = "wait ready"
    PULL = "pull"  # the peer's part for this rank
    PUT_FREE = "put free"


class Act(NamedTuple):
    do: Do
    peer: int


def arrivals(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the order in which the parts of all ranks arrive; a rank's own part is there at once."""
    return tuple((rank + distance) % ranks for distance in range(ranks))


def departures(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the order in which parts are pulled; a rank's own part stays, and is wanted last."""
    return tuple((rank - distance) % ranks for distance in (*range(1, ranks), 0))


def staging(rank: int, ranks: int, parted: bool) -> tuple[Act, ...]:
    """The first half of an exchange: what a rank sends, in order.

    Args:
        parted: each peer is sent a part of its own, as in an all-to-all; else all get the same, as in an all-gather.
    """
    *readers, _ = departures(rank, ranks)
    # For all of them, before anything is staged: parts of this exchange lie where others of the slot's last one lay.
    waits, puts = ([Act(do, peer) for peer in readers] for do in (Do.WAIT_FREE, Do.PUT_READY))
    if not parted:
        return (*waits, Act(Do.STAGE, rank), *puts)
    stages = [Act(Do.STAGE, peer) for peer in readers]
    return (*waits, *(act for pair in zip(stages, puts, strict=True) for act in pair))


def pulling(rank: int, ranks: int) -> tuple[Act, ...]:
    """The second half of an exchange: what a rank receives, in order.

    It may run behind the first half, or beside it: then each half of an exchange behind that of the one before.
    """
    _, *owners = arrivals(rank, ranks)
    each = [(Act(Do.WAIT_READY, peer), Act(Do.PULL, peer), Act(Do.PUT_FREE, peer)) for peer in owners]
    return (Act(Do.KEEP, rank), *(act for acts in each for act in acts))
