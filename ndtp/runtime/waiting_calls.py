"""Calls of layers that are still to be computed, noted on the parameters with which they will be.

A layer waits for what becomes of its result, see `ndtp.models.pending`.  Code that is about to see a parameter may
write to it, so the calls that wait with that parameter are computed first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import nn


def wait_with(call: Any, parameters: Iterable[Any]) -> None:
    """Note, on the parameters of layers, a call of these that is still to be computed.

    Args:
        call: has `settle`, which computes it.
    """
    noted = ref(call)
    for p in parameters:
        if type(p) is not nn.Parameter:
            p.ndtp_waiting = [each for each in getattr(p, "ndtp_waiting", ()) if each() is not None] + [noted]


def settle_calls_of(parameter: Any) -> None:
    """Compute the calls that wait for what becomes of their results, since code is about to see a parameter of theirs,
    and may write to it.
    """
    waiting = getattr(parameter, "ndtp_waiting", None)
    if not waiting or torch.compiler.is_compiling():
        return
    parameter.ndtp_waiting = []
    for each in waiting:
        if (call := each()) is not None:
            call.settle()
