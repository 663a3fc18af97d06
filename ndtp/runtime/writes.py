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
        self._count = 0
        self._begins = weakref.WeakKeyDictionary[Any, int]()  # of watches, by who watches
        self._places = dict[int, tuple[weakref.ref[Any], int]]()

    def watch(self, watcher: object) -> None:
        if not self._begins:
            self._places.clear()
        self._begins[watcher] = self._count

    def begin(self, watcher: Any) -> int | None:
        """Return when this watcher's watch began, and end it; None where it has none, and writes may not be noted."""
        return self._begins.pop(watcher, None)

    def note(self, x: Any) -> None:
        if self._begins:
            memory = x._local_tensor.untyped_storage()
            key, places = id(memory), self._places
            self._count += 1
            places[key] = weakref.ref(memory, lambda _: places.pop(key, None)), self._count

    def since(self, begin: int | None, local: Tensor) -> bool:
        """Return whether a tensor was written to after a watch began: others may have watched before."""
        memory = local.untyped_storage()
        found, at = self._places.get(id(memory), (None, 0))
        return begin is not None and found is not None and found() is memory and at > begin


writes = Writes()
