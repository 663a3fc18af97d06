"""The models whose code runs in this thread, one inside of the other; see `ndtp.runtime.default_group`."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any
from weakref import ref


class _AtWork(threading.local):
    """The models that run in a thread.

    Attributes:
        models: the rows of each, `ndtp.runtime.default_group.OwnRows`.
        local: how many attentions run their code on this rank's heads or rows: plain tensors are parts there.
        asked: how often the group of rows was asked for.
        gathered: for each function that runs with the whole of a split tensor, its grid, and along which axes ranks
            have rows of their own.
        given: of the last results of models: a reference to the grid, these axes, and how many rows there are.
    """

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.local = 0
        self.asked = 0
        self.gathered: list[Any] = []
        self.given: deque[tuple[ref[object], tuple[str, ...], int]] = deque(maxlen=8)


AT_WORK = _AtWork()


def at_work() -> Any:
    """The rows of the model whose code runs in this thread; None where none does."""
    return AT_WORK.models[-1] if AT_WORK.models else None
