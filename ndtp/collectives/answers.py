"""`Answers`: ranks that hear that another one has lost a peer tell it what they wait in, or that they wait in nothing.

Who has said nothing is not behind for that: it may be in the middle of a wait that it has not told of yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ndtp.collectives.flight import NOTE, NTH, WAITED, Flight, FlightEntry
from ndtp.collectives.verdict import ANSWER, Event, Waiting


class Answers:
    """The answers of this rank, and those that it was given.

    One thread, the one of `Presence`, calls `heard`.  Any thread may call the others, the main one while an error is
    made, and sees what was heard until then.

    Args:
        flight: the last collectives of this rank.
    """

    def __init__(self, rank: int, flight: Flight) -> None:
        self._rank, self._flight = rank, flight
        self._heard: dict[int, Event] = {}

    def waiting_now(self, seconds: float = 0.0) -> Waiting | None:
        """Return what this rank has waited in for so many seconds."""
        entry = self._flight.waiting()
        if entry is None or time.monotonic() - entry[WAITED] < seconds:
            return None
        return self._waiting(entry)

    def left_to_device(self) -> list[Waiting]:
        """Return what this rank has begun and may wait in on its device, oldest first."""
        return [self._waiting(entry) for entry in self._flight.left_to_device()]

    def _waiting(self, entry: FlightEntry) -> Waiting:
        note = entry[NOTE]
        others = tuple(rank for rank in note.ranks if rank != self._rank)
        return Waiting(note.text, others, note.ranks, note.axes, entry[NTH])

    def own(self) -> Event:
        """Return this rank's answer; one without ranks is that it waits in nothing."""
        waiting = self.waiting_now()
        text, ranks = ("", ()) if waiting is None else (waiting.text, waiting.ranks)
        return Event(self._rank, ANSWER, text, time.monotonic(), ranks)

    def heard(self, events: Iterable[Event]) -> list[Event]:
        """Keep the answers among these events.  Returns the others."""
        others = []
        for event in events:
            if event.kind == ANSWER:
                self._heard[event.rank] = event
            else:
                others.append(event)
        return others

    def waiting(self, since: float) -> dict[int, Waiting]:
        """Return what others have answered since then, of those who wait."""
        return {
            rank: Waiting(event.text, tuple(event.ranks))
            for rank, event in list(self._heard.items())
            if event.when >= since and event.ranks
        }

    def free(self, since: float) -> set[int]:
        """Return who has answered since then that it waits in nothing."""
        return {rank for rank, event in list(self._heard.items()) if event.when >= since and not event.ranks}
