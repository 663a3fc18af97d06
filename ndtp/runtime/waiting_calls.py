"""Calls of layers that are still to be computed, noted on the parameters with which they will be.

A layer waits for what becomes of its result, see `ndtp.models.pending`.  Code that is about to see a parameter may
write to it, so the calls that wait with that parameter are computed first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch


def wait_with(call: Any, parameters: Iterable[Any]) -> None:
    """Note, on the parameters of layers, a call of these that is still to be computed.

    Args:
        call: has `settle`, which computes it.
    """
    noted = ref(call)
    for p in parameters:
        if "_dtensor" in vars(p):
            p.ndtp_waiting = [each for each in getattr(p, "ndtp_waiting", ()) if each() is not None] + [noted]


def note_data_read(parameter: Any) -> None:
    """Note that code has got a parameter's `.data`, writes to which nobody counts."""
    if torch.compiler.is_compiling():
        return
    settle_calls_of(parameter)
    parameter.ndtp_data_reads = vars(parameter).get("ndtp_data_reads", 0) + 1


def settle_calls_of(parameter: Any) -> None:
    """Compute the calls that wait for what becomes of their results, since code is about to see a parameter of theirs,
    and may write to it.
    """
    waiting = getattr(parameter, "ndtp_waiting", None)
    if not waiting or torch.compiler.is_compiling():
        return
    del parameter.ndtp_waiting
    for each in waiting:
        if (call := each()) is not None:
            call.settle()
