"""The thread of a program that calls a model, also where its work runs in other threads; and functions that call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from ndtp.collectives.turns import TURN

_CALLER = "ndtp_caller"  # the key of the thread in what torch keeps of it


def caller() -> object:
    """Return the turns of this thread, or the thread itself; in a backward those of the thread that asked for it.

    Autograd hands what torch keeps of a thread on to the threads of devices, in which it runs their nodes.
    """
    turn = TURN.get()
    if turn is not None:  # whose backward runs in its own thread
        return turn.turns
    known = torch._C._get_obj_in_tls(_CALLER) if torch._C._is_key_in_tls(_CALLER) else None
    if known is not None and torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
        return known
    me = threading.current_thread()
    if me is not known:  # once a thread: a thread of a device would free the last one while Python ends
        torch._C._stash_obj_in_tls(_CALLER, me)
    return me


def callers(most: int) -> Iterator[FrameType]:
    """Yield the functions that wait for the one that asks, the last one called first; `most` at most."""
    frame: Any = sys._getframe(2)
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
