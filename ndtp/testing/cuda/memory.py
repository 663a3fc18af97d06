"""Memory as kernels touch it: which accesses conflict, and which may still run when memory is freed."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from ndtp.testing.cuda.order import Lane, VectorClock, is_before

if TYPE_CHECKING:
    from collections.abc import Callable


_COMPARED = 1 << 22  # elements up to which two views are compared one by one; larger ones by their first and last byte
_NUMBERS = itertools.count()


class View(NamedTuple):
    """The bytes of a storage that a tensor covers."""

    first: int
    past: int
    is_dense: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, x: Tensor) -> View:
        """The bytes that a tensor covers; it has elements."""
        item, size, stride = x.element_size(), tuple(x.shape), tuple(x.stride())
        span = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        elements = int(np.prod([n for n, step in zip(size, stride, strict=True) if step], dtype=np.int64))
        first = int(x.storage_offset()) * item
        return cls(first, first + span * item, elements == span, size, stride, item)

    def overlaps(self, other: View) -> bool:
        if self.past <= other.first or other.past <= self.first:
            return False
        if (self.is_dense and other.is_dense) or self.itemsize != other.itemsize:
            return True
        if max(self.past - self.first, other.past - other.first) > _COMPARED * self.itemsize:
            return True
        return bool(np.intersect1d(self._places(), other._places()).size)

    def _places(self) -> Any:
        places = np.array([self.first])
        for n, step in zip(self.size, self.stride, strict=True):
            if step:
                places = (places[:, None] + np.arange(n) * step * self.itemsize).ravel()
        return places


class Access(NamedTuple):
    lane: int
    tick: int
    view: View
    what: str


@dataclass(eq=False)
class MemoryBlock:
    """Memory of one storage.

    Attributes:
        made_by: the operation whose result it was, for messages.
        home: the lane on which it was allocated, and to whose later allocations it goes when it is freed.
        capture: the capture in whose pool it lies; None: in the allocator's.
        streams: lanes that it was told of by `record_stream`.
    """

    made_by: str
    home: Lane
    capture: Any
    number: int = field(default_factory=lambda: next(_NUMBERS))
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    streams: set[int] = field(default_factory=set)
    storage: Any = None  # a weak reference

    def __str__(self) -> str:
        return f"the memory that {self.made_by} made on {self.home.name}"

    def conflicts(self, view: View, lane: Lane, is_write: bool) -> Access | None:
        """Return an access of another lane that may run at the same time and must not."""
        for access in itertools.chain(self.writes, self.reads if is_write else ()):
            may_run = access.lane != lane.number and lane.clock.get(access.lane, 0) < access.tick
            if may_run and access.view.overlaps(view):
                return access
        return None

    def note(self, access: Access, clock: VectorClock, is_write: bool) -> None:
        """Keep an access, and drop those that need not be compared with any more."""
        if is_write:
            self.writes = [old for old in self.writes if not _is_covered(old, access, clock)]
            self.reads = [old for old in self.reads if not _is_covered(old, access, clock)]
            self.writes.append(access)
        else:
            self.reads = [old for old in self.reads if old.lane != access.lane or old.view != access.view]
            self.reads.append(access)

    def still_used(self, host: VectorClock) -> Access | None:
        """Return an access that may still run when the memory goes to the next allocation on its home lane."""
        for access in itertools.chain(self.writes, self.reads):
            known = access.lane == self.home.number or access.lane in self.streams
            if not known and not is_before([access[:2]], self.home.clock, host):
                return access
        return None


def _is_covered(old: Access, new: Access, clock: VectorClock) -> bool:
    """Return whether whatever conflicts with an older access also conflicts with a newer write."""
    is_ordered = old.lane == new.lane or clock.get(old.lane, 0) >= old.tick
    return is_ordered and new.view.is_dense and new.view.first <= old.view.first and old.view.past <= new.view.past


class Blocks:
    """All memory that was seen, by its storage.

    Args:
        freed: is told of memory whose storage went.
    """

    def __init__(self, freed: Callable[[MemoryBlock], None]) -> None:
        self._by_storage: dict[int, MemoryBlock] = {}
        self._freed = freed

    def find(self, x: Tensor) -> MemoryBlock | None:
        return self._by_storage.get(x.untyped_storage()._cdata)

    def add(self, x: Tensor, made_by: str, home: Lane, capture: Any) -> MemoryBlock:
        """Know the storage of a tensor from now on, until it goes."""
        storage = x.untyped_storage()
        key = storage._cdata
        block = self._by_storage[key] = MemoryBlock(made_by, home, capture)
        freed, known = self._freed, self._by_storage

        def gone(_: object) -> None:
            if known.get(key) is block:
                del known[key]
            freed(block)

        block.storage = weakref.ref(storage, gone)
        return block
