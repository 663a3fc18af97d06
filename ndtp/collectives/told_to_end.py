"""SIGTERM from torchrun, which ends all ranks when one has failed: those that wait say who, before they end.

A wait of gloo does not return for a signal, and a signal that Python handles is handled when it has returned.  But
Python tells of the signal at once by a pipe, which the thread of `Presence` listens to.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

LAUNCHED_BY = "TORCHELASTIC_RUN_ID"
OWN_WORDS_S = 2.0  # for what fails already, to say so itself


def heed(pipe: int, is_failing: Callable[[], bool], is_told: threading.Event) -> bool:
    """Have SIGTERM told to a pipe, where torchrun started this process and nobody else heeds it.

    Args:
        pipe: the writing end, which does not block.
        is_failing: whether this process says itself why it ends.
        is_told: set when others have said it.

    Returns:
        Whether it is: not in a program that has a handler, or in a thread but the main one.
    """
    if (
        LAUNCHED_BY not in os.environ
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return False
    before = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return False

    def end(number: int, frame: object) -> None:
        if not is_failing():
            is_told.wait(OWN_WORDS_S)
            end_at_once()

    signal.signal(signal.SIGTERM, end)
    return True


def heed_no_more() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_at_once() -> None:
    """End this process as the signal would have, from any thread."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # the default
    os.kill(os.getpid(), signal.SIGTERM)
