"""Checks that a tensor was not changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from ndtp.runtime.memories import Memories, memories_of

_version = attrgetter("_version")
_PLACE = -2  # from there on a version has where the tensor lies; before it counts of changes, if torch has any


def version_of(x: Tensor) -> tuple[int, ...]:
    """Changes when the tensor is changed in place, or is given other memory; writes to its `.data` are seen by nobody.

    An operation on a DTensor counts on the DTensor alone, one on its local tensor there alone.
    """
    local = getattr(x, "_local_tensor", x)
    memories: Memories | None = getattr(x, "ndtp_memories", None)
    number = 0 if memories is None else memories.number
    if local.is_inference() or x.is_inference():  # torch counts no changes of these
        return local.data_ptr(), number
    return x._version, getattr(x, "_dtensor", local)._version, local._version, local.data_ptr(), number


class Versions:
    """The numbers of some tensors that change when the tensors are changed in place.

    Args:
        swaps: whether other memory counts as a change, too; without it a look takes a tenth of the time.
    """

    def __init__(self, tensors: Sequence[Tensor], swaps: bool = True) -> None:
        self._tensors, self._swaps = tensors, swaps
        self._asked = [each for x in tensors for each in (x, getattr(x, "_local_tensor", x), memories_of(x))]

    def now(self) -> list[Any]:
        if not self._swaps:
            try:
                return [*map(_version, self._asked)]
            except RuntimeError:  # tensors of inference, of which torch counts no changes
                pass
        return [version_of(x) for x in self._tensors]

    def of_new(self, now: Sequence[Any]) -> list[object]:
        """Return what `now` would be if nobody had written to the tensors since they were made."""
        each = max(len(now) // max(len(self._tensors), 1), 1)
        if each == 1:
            return [(0, *x[1:]) if x[:_PLACE] else x for x in now]
        return [0 if i % each == 0 else x for i, x in enumerate(now)]

    def changed(self, before: Sequence[Any], now: Sequence[Any]) -> dict[int, int]:
        """Return which of the tensors have other numbers, by their places, and how often they were written to; 0 where
        that is not known.
        """
        each = max(len(now) // max(len(self._tensors), 1), 1)
        found: dict[int, int] = {}
        for i, (a, b) in enumerate(zip(before, now, strict=True)):
            if a != b:
                is_counted = each > 1 and i % each == 0
                found[i // each] = found.get(i // each, 0) + (b - a if is_counted else 0)
        return found


def refuse_changed(x: Tensor, seen: tuple[int, ...], what: str) -> None:
    """Refuse a changed tensor that backward needs as forward saw it.

    Raises:
        RuntimeError: as torch's own, where it was changed in place since.
    """
    if (now := version_of(x)) != seen:
        how = "has other memory since"
        if now[_PLACE:] == seen[_PLACE:]:
            is_at, expected = next((a, b) for a, b in zip(now, seen, strict=True) if a != b)
            how = f"is at version {is_at}; expected version {expected} instead"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{what}, {tuple(x.shape)}, {how}\n  fix: backward first, or compute with a clone"
        )
