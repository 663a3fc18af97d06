"""The stand-in that is in place, as streams, graphs and collectives find it."""

from __future__ import annotations

from typing import Any

ACTIVE: list[object] = []


class CudaFault(RuntimeError):
    """Something that CUDA would refuse, or that would go wrong there in silence."""


def machine() -> Any:
    """Return the `RecordedCuda` that is in place.

    Raises:
        CudaFault: there is none.
    """
    if not ACTIVE:
        raise CudaFault("no RecordedCuda is in place")
    return ACTIVE[-1]
