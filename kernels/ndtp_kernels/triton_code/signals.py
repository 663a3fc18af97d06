"""Signals between ranks: kernels that wait on the device until a peer has seen to the signal."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def put_signal_kernel(signal):
    """Raise a signal when it is down, as torch's symmetric memory does it."""
    found = tl.atomic_cas(signal, 0, 1, sem="release", scope="sys")
    while found != 0:
        found = tl.atomic_cas(signal, 0, 1, sem="release", scope="sys")


@triton.jit
def take_signal_kernel(signal):
    """Lower a signal when it is up."""
    found = tl.atomic_cas(signal, 1, 0, sem="acquire", scope="sys")
    while found != 1:
        found = tl.atomic_cas(signal, 1, 0, sem="acquire", scope="sys")
