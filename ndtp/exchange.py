"""Gathers and all-to-alls of gloo as direct exchanges between peers.

Every message lands where it belongs, without gloo's threads and staging buffers, and goes both ways at once; none has
to be passed on by a rank that is busy multiplying.  Behind 500 Mbit/s links a gather of 4 MiB over two ranks took 77 ms
instead of 126, an all-to-all 47 instead of 70.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

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


@dataclass
class Past:
    """What a group has seen: exchanges that were started, and collectives that were given up unfinished.

    Groups are shared by grids (`ndtp.groups`), and so is their past.
    """

    started: int = 0
    given_up: list[Any] = field(default_factory=list)


_PASTS: WeakKeyDictionary[ProcessGroup, Past] = WeakKeyDictionary()


def past_of(group: ProcessGroup) -> Past:
    past = _PASTS.get(group)
    if past is None:
        past = _PASTS[group] = Past()
    return past


def exchange(group: ProcessGroup, sent: Sequence[Tensor], landing: Sequence[Tensor]) -> Exchange:
    """Send `sent[j]` to rank j of the group, and receive `landing[j]` from it; both are contiguous.

    Messages carry a number that counts the exchanges of their group: one that is given up, on all ranks, leaves no
    message behind that a later one would take for its own.
    """
    ranks, me, past = group.size(), group.rank(), past_of(group)
    tag = FIRST_TAG + past.started % 2**20
    past.started += 1
    peers = [(me + distance) % ranks for distance in range(1, ranks)]
    works = [group.recv([landing[j]], j, tag) for j in reversed(peers)]
    works += [group.send([sent[j]], j, tag) for j in peers]
    landing[me].copy_(sent[me])
    return Exchange(works)
