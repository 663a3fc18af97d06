"""Checks that a tensor was not changed in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ndtp.runtime.memories import Memories, memories_of

Version = int | tuple[int, ...]
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


def _own(version: Version) -> int:
    return version if isinstance(version, int) else version[0] if version[:_PLACE] else 0


class Versions:
    """The numbers of some tensors that change when the tensors are changed in place.

    Args:
        swaps: whether other memory counts as a change, too; without it a look takes a tenth of the time.
    """

    def __init__(self, tensors: Sequence[Tensor], swaps: bool = True) -> None:
        self._tensors, self._swaps = tensors, swaps
        self._asked = [*tensors, *(getattr(x, "_local_tensor", x) for x in tensors)]
        self._memories = [memories_of(x) for x in tensors]
        self._changes, self._swapped = -1, list[int]()  # of all memories, and of each one when that was so

    def now(self) -> list[Any]:
        """Return numbers of which each tensor has one, or three: behind its own of all come those of what lies on this
        rank, and how often each was given other memory.
        """
        if not self._swaps:
            if self._changes != Memories.changes:
                self._changes = Memories.changes
                self._swapped = [x._version if isinstance(x, Memories) else 0 for x in self._memories]
            try:
                with torch._C.DisableTorchFunctionSubclass():  # half the time of a read: torch looks for no override
                    return [*map(_version, self._asked), *self._swapped]
            except RuntimeError:  # tensors of inference, of which torch counts no changes
                pass
        return [version_of(x) for x in self._tensors]

    def of_new(self, now: Sequence[Any]) -> list[object]:
        """Return what `now` would be if nobody had written to the tensors since they were made."""
        count = len(self._tensors)
        if len(now) == count:
            return [(0, *x[1:]) if x[:_PLACE] else x for x in now]
        return [0] * count + [*now[count:]]

    def between(self, before: Sequence[Version], now: Sequence[Version]) -> list[int]:
        """Return how often each tensor was written to, shards by themselves left out; 0 where that is not known."""
        if len(before) != len(now):
            return [0] * len(self._tensors)
        return [_own(b) - _own(a) for a, b, _ in zip(before, now, self._tensors, strict=False)]

    def changed(
        self, before: Sequence[Any], now: Sequence[Any], known: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Return which of the tensors have other numbers, by their places, and how often they were written to; 0 where
        that is not known, as of a tensor that was given other memory, which counts anew.

        Args:
            known: the same of an earlier time, to which it is added.
        """
        count = len(self._tensors)
        found = dict(known or {})
        for i, (a, b) in enumerate(zip(before, now, strict=True)):
            if a != b:
                is_counted = i < count < len(now)
                found[i % count] = found.get(i % count, 0) + (max(b - a, 0) if is_counted else 0)
        return dict(sorted(found.items()))


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
