"""The verdict on a failed collective: one sentence from what is known of the ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ndtp.collectives.liveness import GONE, STOPPED

# What a rank tells the others of itself, or one of another.
RAISED, ENDED, LOST, RECOVERED, DEPARTED = "raised", "ended", "lost", "recovered", "departed"
TOLD = "told"  # to end, by who launched it
CUT = "cut"  # lost a peer, since a connection broke and not since time was up
ANSWER = "answer"  # to one that has lost a peer: what this rank waits in, if anything
START_UP = "(start-up)"  # of the text of a wait for the making of a process group
CLOSING_S = 1.0  # gloo closes connections when time is up: others see it about when that rank says so
SHOWN = 4  # ranks of which an error says what they are in
MESSAGES = ("send", "receive")  # of the texts of waits for messages
SILENT, BEHIND, APART, UNKNOWN, ABSENT, LINK = "silent", "behind", "apart", "unknown", "absent", "link"


class Event(NamedTuple):
    """Something that was said of a rank.

    Attributes:
        when: seconds of this machine's monotonic clock; of what was said on another one, when it was heard here.
        ranks: whom it waited for, if it lost one of them.
    """

    rank: int
    kind: str
    text: str
    when: float
    ranks: Sequence[int] = ()


class Waiting(NamedTuple):
    """A rank that is in a collective: which one, and for whom it waits there.

    Attributes:
        members: the ranks that take part, this one included, as the collective's `Note` has them.
        axes: of the collective.
        nth: how many-th it is of those ranks over those axes; 0 where that is not known.
    """

    text: str
    ranks: tuple[int, ...]
    members: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    nth: int = 0


@dataclass
class Facts:
    """The facts that a rank knows when a collective of its own has failed.

    Attributes:
        events: in any order.
        states: of ranks on this machine, as its kernel has them.
        departed: ranks of this machine whose processes ended, and when that was seen.
        silent: ranks elsewhere whose heartbeat does not come.
        waiting: ranks that said that they are in a collective, or that one failed for them.
        absent: ranks that have not said who they are.
        free: ranks that have answered that they wait in nothing, since this one has lost its peer.
        own: the collective in which this rank has lost its peer, where it is in the record.
    """

    events: Sequence[Event] = ()
    states: Mapping[int, str] = field(default_factory=dict)
    departed: Mapping[int, float] = field(default_factory=dict)
    silent: Collection[int] = ()
    waiting: Mapping[int, Waiting] = field(default_factory=dict)
    absent: Collection[int] = ()
    free: Collection[int] = ()
    own: Waiting | None = None

    def prove(self, verdict: Verdict) -> bool:
        """Return whether a verdict does not rest on what ranks have not said."""
        return verdict.how != BEHIND or set(verdict.ranks) <= set(self.free)


class Verdict(NamedTuple):
    """The verdict: which ranks are to blame, and why.

    Attributes:
        how: "gone", "raised", "ended", "stopped", "silent", "absent", "behind", "apart", "link" or "unknown".
        ranks: of the world; the first of them first.
        text: what is known beside that.
    """

    how: str
    ranks: tuple[int, ...]
    text: str = ""

    @property
    def is_sure(self) -> bool:
        return self.how in (GONE, RAISED, ENDED, STOPPED)

    def sentence(self, place: Callable[[int], str] = lambda rank: "") -> str:
        """Return the verdict for an error: "gone: rank 3 (y=1, x=1), its process ended without a word"."""
        names = ", ".join(f"rank {rank}{place(rank)}" for rank in self.ranks)
        return f"{_WORDS[self.how]}{names}{', ' if names and self.text else ''}{self.text}"


_WORDS = {
    GONE: "gone: ",
    RAISED: "gone: ",
    ENDED: "gone: ",
    STOPPED: "stopped: ",
    SILENT: "silent: ",
    ABSENT: "silent: ",
    BEHIND: "behind: ",
    APART: "apart: ",
    LINK: "link: ",
    UNKNOWN: "",
}


def judge(me: int, waited_for: Sequence[int], facts: Facts) -> Verdict:
    """The first that left without having lost another one before; else who does not answer; else who is behind.

    A rank that left after it had lost another is a consequence, and so is one that was told to end as this one is.  One
    that was told to end where this one was not comes before those that left later: their launcher may end it alone.
    Among ranks that are all there, those are behind that others wait for, directly or through others, and that wait
    for nobody; and those apart that wait in another collective at the same place.  Where a connection broke and all
    are alive, it is the link that failed: those that have not noticed yet are not behind.
    """
    # What a rank said itself stands, whatever others say of its end.
    own_words = sorted((event for event in facts.events if event.kind != DEPARTED), key=lambda event: event.when)
    last = {event.rank: event for event in own_words}
    stopped = sorted(rank for rank, state in facts.states.items() if state == STOPPED)
    if stopped:
        return Verdict(STOPPED, tuple(stopped), "by a signal (SIGSTOP), not dead")
    left: list[tuple[float, int, Verdict]] = []
    for rank, event in last.items():
        if event.kind in (RAISED, ENDED):
            verb = "which raised " if event.kind == RAISED else ""
            left.append((event.when, rank, Verdict(event.kind, (rank,), verb + event.text)))
    gone = {event.rank: event.when for event in facts.events if event.kind == DEPARTED} | dict(facts.departed)
    gone |= {rank: gone.get(rank, float("inf")) for rank, state in facts.states.items() if state == GONE}
    said = {rank for rank, event in last.items() if event.kind in (RAISED, ENDED)}
    lost = {event.rank: event.when for event in last.values() if event.kind in (LOST, CUT)}
    told = {event.rank for event in own_words if event.kind == TOLD}
    for rank, when in gone.items():
        if rank not in said | told and rank not in lost and rank != me:
            left.append((when, rank, Verdict(GONE, (rank,), "its process ended without a word")))
    left = [entry for entry in left if entry[1] != me]
    if me not in told and all(math.isfinite(when) for when, _, _ in left):
        why = "which was told to end (SIGTERM)"
        left += [(when, rank, Verdict(ENDED, (rank,), why)) for rank, when in gone.items() if rank in told]
    if left:  # of two at one time, one that is known to have been told
        return min(left, key=lambda entry: (entry[0], entry[1] not in told, entry[1]))[2]
    for how, ranks, text in (
        (SILENT, facts.silent, "no heartbeat comes; its process, machine or network is gone or stopped"),
        (ABSENT, facts.absent, "it has not come to the first grid"),
    ):
        ranks = sorted(set(ranks) - {me} - set(lost))
        if ranks:
            return Verdict(how, tuple(ranks), text)
    losses = sorted((event for event in last.values() if event.kind in (LOST, CUT)), key=lambda event: event.when)
    in_vain = [event.when for event in losses if event.kind == LOST]
    if losses and losses[0].kind == CUT and min(in_vain, default=float("inf")) > losses[0].when + CLOSING_S:
        # Nobody had left or been waited for in vain before: who is in no collective has only not noticed yet.
        noticed = f"rank {losses[0].rank} noticed first, in {losses[0].text}"
        return Verdict(LINK, (), f"a connection broke between ranks that were all alive; {noticed}")
    waiting = {event.rank: Waiting(event.text, tuple(event.ranks)) for event in losses if event.ranks}
    if behind := _behind(me, waited_for, waiting | dict(facts.waiting), set(lost)):
        return Verdict(BEHIND, behind, "alive, but in no collective that this one waits for")
    ended = any(rank in lost and rank != me for rank in gone)
    if losses and (ended or any(START_UP in event.text for event in losses)):
        # Nobody is missing but those that had lost their peers before: what failed lies between the ranks.
        noticed = f"rank {losses[0].rank} noticed first, in {losses[0].text}"
        return Verdict(LINK, (), f"connections failed between ranks that were all alive; {noticed}")
    return _apart(facts.own, facts.waiting) or Verdict(UNKNOWN, (), _all_alive(me, waiting | dict(facts.waiting)))


def _behind(me: int, waited_for: Sequence[int], waiting: Mapping[int, Waiting], lost: set[int]) -> tuple[int, ...]:
    """Return, of the ranks that this one waits for directly or indirectly, those that wait for no rank."""
    seen, found, todo = {me}, set(), [rank for rank in waited_for if rank != me]
    while todo:
        rank = todo.pop()
        if rank in seen:
            continue
        seen.add(rank)
        if rank in waiting:
            todo += waiting[rank].ranks
        elif rank not in lost:
            found.add(rank)
    return tuple(sorted(found))


def _all_alive(me: int, waiting: Mapping[int, Waiting]) -> str:
    """Return what is known where every rank is alive: what others are in, each as they say it."""
    where = [f"rank {rank} is in {each.text}" for rank, each in sorted(waiting.items()) if rank != me and each.text]
    more = [f"and {len(where) - SHOWN} more"] * (len(where) > SHOWN)
    said = "; ".join(["they wait for each other, or cannot reach each other", *where[:SHOWN], *more])
    return f"every rank is alive: {said}"


def _apart(own: Waiting | None, waiting: Mapping[int, Waiting]) -> Verdict | None:
    """Return who waits in a collective that is to its ranks what this rank's is, by its number, and is another one.

    Messages are sent on one rank and received on the other.
    """
    if own is None or not own.nth or own.text.startswith(MESSAGES):
        return None
    place = own.members, own.axes, own.nth
    here = {rank: each for rank, each in waiting.items() if (each.members, each.axes, each.nth) == place}
    other = next((each.text for each in here.values() if each.text != own.text), None)
    if other is None:
        return None
    ranks = tuple(sorted(rank for rank, each in here.items() if each.text == other))
    return Verdict(
        APART, ranks, f"in {other}, where this rank is in {own.text}; all ranks must do the same in one order"
    )


def never_begun(
    me: int,
    begun: Mapping[tuple[tuple[int, ...], tuple[str, ...]], int],
    waiting: Mapping[int, Waiting],
    on_device: Mapping[int, Sequence[Waiting]] = MappingProxyType({}),
) -> dict[int, str]:
    """Return the collectives in which ranks wait for `me`, and which `me` has not begun, by the rank that waits.

    Args:
        begun: how many collectives `me` has begun, of which ranks and over which axes.
        on_device: what ranks that do not come have begun, in their order.  Their hosts do not know what ends on their
            devices; but a rank that has come where they have not, and has not begun these, has left them out.
    """
    found: dict[int, str] = {}
    for rank in {**on_device, **waiting}:
        for wait in (*([waiting[rank]] if rank in waiting else []), *on_device.get(rank, ())):
            if me in wait.ranks and wait.nth > begun.get((wait.members, wait.axes), 0):
                found.setdefault(rank, wait.text)
    return found
