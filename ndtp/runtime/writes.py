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
        self.watchers, self._places = 0, dict[int, weakref.ref[Any]]()

    def watch(self) -> None:
        if not self.watchers:
            self._places.clear()
        self.watchers += 1

    def note(self, x: Any) -> None:
        if self.watchers:
            memory = x._local_tensor.untyped_storage()
            self._places[id(memory)] = weakref.ref(memory)

    def __contains__(self, local: Tensor) -> bool:
        memory = local.untyped_storage()
        found = self._places.get(id(memory))
        return found is not None and found() is memory


writes = Writes()
