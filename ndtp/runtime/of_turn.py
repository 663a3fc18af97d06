"""`OfTurn`: attributes that parts of a batch which run in turns have each for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ndtp.collectives.turns import TURN


def of_turn(owner: object) -> dict[str, Any]:
    """Return the attributes of an object that are this turn's alone: its own attributes where nothing runs in turns.

    For hooks of every call, which read several of them at once; see `OfTurn`.
    """
    turn = TURN.get()
    return vars(owner) if turn is None else turn.of(owner)


class OfTurn:
    """An attribute that holds between calls what is true of one forward or backward: each thread has its own.

    Args:
        default: makes its first value.
    """

    def __init__(self, default: Callable[[], Any] = lambda: None) -> None:
        self._default = default

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        if owner is None:
            return self
        turn = TURN.get()
        values = owner.__dict__ if turn is None else turn.of(owner)  # `of_turn`, written out: this runs in each layer
        try:
            return values[self._name]
        except KeyError:
            made = values[self._name] = self._default()
            return made

    def __set__(self, owner: object, value: object) -> None:
        of_turn(owner)[self._name] = value
