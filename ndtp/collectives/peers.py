"""The processes of other ranks on this machine, whose end the kernel tells of at once."""

from __future__ import annotations

import os
import select
import time

from ndtp.collectives.liveness import GONE, RUNNING, Identity, open_pidfd, state_of


class Peers:
    """Ranks on this machine, as far as they are known.

    Args:
        poll: becomes readable when one of them ends.

    Attributes:
        known: who they are, by rank.
        departed: when their end was seen, by rank.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self.known: dict[int, Identity] = {}
        self.departed: dict[int, float] = {}
        self._pidfds: dict[int, int] = {}

    def meet(self, who: Identity) -> bool:
        """Watch one more rank.  Returns whether it is gone already."""
        self.known[who.rank] = who
        descriptor = open_pidfd(who)
        if descriptor is None:
            return state_of(who) == GONE
        self._pidfds[descriptor] = who.rank
        self._poll.register(descriptor, select.POLLIN)
        return False

    def ended(self, descriptor: int) -> int:
        """Return the rank whose end a descriptor tells of, which is watched no more."""
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return self._pidfds.pop(descriptor)

    def depart(self, rank: int) -> None:
        self.departed[rank] = time.monotonic()

    def states(self) -> dict[int, str]:
        return {rank: state_of(who) for rank, who in list(self.known.items())}

    def runs(self, rank: int) -> bool:
        """Whether a rank runs, as far as this machine knows: of one elsewhere, yes."""
        who = self.known.get(rank)
        return who is None or state_of(who) == RUNNING

    def close(self) -> None:
        for descriptor in self._pidfds:
            os.close(descriptor)
