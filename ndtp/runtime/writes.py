"""`writes`: the tensors of a grid that operations have written to since somebody watches."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor


class Writes:
    """The memory of tensors of a grid that operations have written to, also where no version of torch's tells it.

    There is one, `writes`.  An operation on a grid runs on every rank, and may write to the shards of some alone.
    """

    def __init__(self) -> None:
        self._watchers, self._places = weakref.WeakSet[Any](), dict[int, weakref.ref[Any]]()

    def watch(self, watcher: Any) -> None:
        if not self._watchers:
            self._places.clear()
        self._watchers.add(watcher)

    def watched_by(self, watcher: Any) -> bool:
        """Return whether all writes since this watcher's `watch` are noted, and end its watch."""
        was_there = watcher in self._watchers
        self._watchers.discard(watcher)
        return was_there

    def note(self, x: Any) -> None:
        if self._watchers:
            memory = x._local_tensor.untyped_storage()
            key, places = id(memory), self._places
            places[key] = weakref.ref(memory, lambda _: places.pop(key, None))

    def __contains__(self, local: Tensor) -> bool:
        memory = local.untyped_storage()
        found = self._places.get(id(memory))
        return found is not None and found() is memory


writes = Writes()
