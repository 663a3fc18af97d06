"""`Watch`: what is waited for inside has a name, is recorded, and fails with an error that says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ndtp.collectives.flight import DONE, STARTED, WAITED, FlightEntry, Note
from ndtp.collectives.labels import LABEL, Label
from ndtp.collectives.last_words import lost_peer
from ndtp.collectives.own_presence import presence
from ndtp.errors import CommunicationError


class Watch:
    """Names the collectives that are started inside, and says of one that fails what it was for.

    Args:
        describe: `AxisGroups.describe`, or what it has said.
        ranks: of the world, that take part.
        records: what is inside is one collective that is waited for at once, and goes into the record.
    """

    __slots__ = ("_entry", "_records", "_token", "describe", "label", "ranks")

    def __init__(
        self,
        describe: Callable[[Sequence[str]], str],
        label: Label,
        ranks: Sequence[int] = (),
        records: bool = True,
    ) -> None:
        self.describe, self.label, self.ranks, self._records = describe, label, ranks, records
        self._entry: FlightEntry | None = None

    def __enter__(self) -> None:
        self._token = LABEL.set(self.label)
        if self._records and self.ranks and (here := presence()) is not None:
            self._entry = here.flight.start(_note(self.label, self.ranks), 0)
            self._entry[WAITED] = self._entry[STARTED]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        LABEL.reset(self._token)
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            raise failure(self.label, self.describe, error, self.ranks) from error
        if self._entry is not None and error is None:
            self._entry[DONE] = time.monotonic()


def failure(
    label: Label, describe: Callable[[Sequence[str]], str], error: RuntimeError, ranks: Sequence[int] = ()
) -> CommunicationError:
    """The error that says what a collective was for, whom it waited for, and who is to blame."""
    if isinstance(error, CommunicationError):
        return error
    return lost_peer(_note(label, ranks).text, ranks, describe(label.axes), error)


def _note(label: Label, ranks: Sequence[int]) -> Note:
    return Note(label.op, label.phase, label.collective, label.axes, label.part, tuple(ranks))
