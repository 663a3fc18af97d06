"""Threads of a rank that run in turns: one at a time, handed over where it would wait for a collective.

Which of them runs is decided by what they wait for, in a fixed order and never by timing: ranks that run the same
program start the same collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

_NOTHING: AbstractContextManager[None] = nullcontext()


class BrokenOff(BaseException):
    """Raised where a thread waits for its turn, when another one has failed.  Not an `Exception`: it is not its own."""


class Turns:
    """The order of threads that run in turns, first to last and from the beginning, without those that are done.

    Args:
        count: how many there are; the first one's turn it is.
        switch: called between two turns with the number of the thread whose turn it will be.

    Attributes:
        error: the first exception that ended one of them; the others are broken off at their next wait.
    """

    def __init__(self, count: int, switch: Callable[[int], None]) -> None:
        self._switch = switch
        self._gates = [threading.Lock() for _ in range(count)]
        for gate in self._gates:
            gate.acquire()
        self._unfinished = list(range(count))
        self._holder = 0
        self.error: BaseException | None = None

    def run(self, number: int, action: Callable[[], Any]) -> Any:
        """Run all that thread `number` does, in its own thread; return its result, or None if it was broken off."""
        turn = Turn(self, number)
        token = TURN.set(turn)
        try:
            if number > 0:
                self._wait(number)
            self._go_on()
            result = action()
            turn.keep()
            return result
        except BaseException as error:
            if self.error is None:
                self.error = error
        finally:
            TURN.reset(token)
            self._finish(number)

    def hand_over(self, number: int) -> None:
        """Let the others run, each up to its next wait.

        Raises:
            BrokenOff: one of them has failed.
        """
        following = self._following(number)
        if following != number:
            try:
                self._pass_to(following)
                self._wait(number)
            except BaseException as error:  # Ctrl-C, while another one runs: that goes as far as its next wait
                self._regain(number)  # before the others know: those whose turn comes first run on every rank
                self.error = self.error or error
        self._go_on()

    def _following(self, number: int) -> int:
        later = [each for each in self._unfinished if each > number]
        return later[0] if later else self._unfinished[0]

    def _pass_to(self, number: int) -> None:
        self._switch(number)
        self._holder = number
        self._gates[number].release()

    def _wait(self, number: int) -> None:
        self._gates[number].acquire()

    def _regain(self, number: int) -> None:
        if self._holder == number:  # it has come already
            self._gates[number].acquire(blocking=False)
        else:
            self._wait(number)

    def _go_on(self) -> None:
        if self.error is not None:
            raise BrokenOff

    def _finish(self, number: int) -> None:
        following = self._following(number)
        self._unfinished.remove(number)
        if self._unfinished:
            self._pass_to(following)


class Turn:
    """The state that one of these threads has to itself.

    Attributes:
        stays: whether it waits without handing over.
    """

    def __init__(self, turns: Turns, number: int) -> None:
        self.turns, self.number = turns, number
        self.stays = False
        self._own: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the identity of objects, which are kept

    def hand_over(self) -> None:
        """See `Turns.hand_over`."""
        if not self.stays:
            self.turns.hand_over(self.number)

    def of(self, owner: Any) -> dict[str, Any]:
        """The attributes of an object that are `OfTurn`."""
        return self._own.setdefault(id(owner), (owner, {}))[1]

    def keep(self) -> None:
        """Leave them behind, as if no others had run beside."""
        for owner, values in self._own.values():
            vars(owner).update(values)


TURN: ContextVar[Turn | None] = ContextVar("ndtp_turn", default=None)


def hand_over() -> None:
    """Let the threads that run in turns with this one go on, where a collective is waited for."""
    turn = TURN.get()
    if turn is not None:
        turn.hand_over()


def staying() -> AbstractContextManager[None]:
    """Inside, this thread waits without handing over.

    Where ranks may wait at other points, as they do where gradients arrive, or where time is measured.
    """
    turn = TURN.get()
    return _NOTHING if turn is None or turn.stays else _staying(turn)


@contextmanager
def _staying(turn: Turn) -> Iterator[None]:
    turn.stays = True
    try:
        yield
    finally:
        turn.stays = False
