"""`Conversation`: what the ranks of a group tell each other beside their tensors, one exchange after the other.

It has messages, or memory, of its own.  So it comes to an end whatever ranks do otherwise, and two that are about to
start different collectives learn of it before either waits for the other.  It is no traffic of tensors, and
`CommMeter` does not count it.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock, Thread, current_thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.distributed as dist

from ndtp.collectives.board import ROW, Board, Missing, Row, shared_board
from ndtp.collectives.labels import ASIDE, LABEL
from ndtp.collectives.own_presence import presence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Below those of exchanges (`ndtp.collectives.direct_exchange`), above those that users give their own messages.
_TAG = 2**29
_LONGEST = 2**32  # bytes of what a rank says
_DEFAULT_TIMEOUT_S = 1800.0  # torch's for gloo


class Conversation:
    """A conversation of all ranks of a gloo group, which take part in every exchange, in one order.

    Attributes:
        members: the global ranks, in the order of the group.
        speaker: what a thread of this rank is at, between the exchanges that belong to it; see `ndtp.runtime.points`.
        lock: of who looks at `speaker`.
        thread: which has taken part last.
    """

    def __init__(self, group: ProcessGroup, timeout: float | None) -> None:
        self.members = dist.get_process_group_ranks(group)
        self._group = ref(group)  # held by whoever has the group: a conversation keeps none alive
        self._ranks, self._rank = group.size(), group.rank()
        self._timeout = timeout or _timeout_of(group)
        self._board: Board | None = None
        self._has_looked = False
        self.speaker: Any = None
        self.lock = RLock()
        self.thread: Thread = current_thread()

    def exchange(self, row: Row) -> list[Row]:
        """The rows of all ranks, in the order of the group.

        Raises:
            HeldElsewhere: a rank waits for this one in a collective that this one has not begun.
            Missing: names ranks that have ended or not come.
        """
        self.thread = current_thread()
        return self._sent_round(row) if self._board is None else self._board.exchange(row, self._look)

    def meet(self) -> None:
        """Find out, once, whether all ranks share memory; a collective.

        From then on those that wait in an exchange look within a second for what the missing ones wait in.
        """
        if not self._has_looked:
            self.thread = current_thread()
            self._board = shared_board(self._rank, self._ranks, self._timeout, self._sent_round)
            self._has_looked = True

    def _look(self, missing: Sequence[int]) -> None:
        others = (each.thread for each in list(_CONVERSATIONS.values()))
        if any(each is not self.thread and each.is_alive() for each in others):
            return  # another thread of this rank, on groups of its own, may be about to begin what they wait in
        here = presence()
        found = {} if here is None else here.never_begun([self.members[rank] for rank in missing])
        if found:
            raise HeldElsewhere(found)

    def texts(self, text: str) -> list[str]:
        """Return what each rank says, at any length.

        Raises:
            RuntimeError: another rank is in another exchange, as one that has caught the error of an earlier one.
        """
        said = text.encode()
        lengths = [
            int.from_bytes(row[:8], "little") for row in self.exchange(len(said).to_bytes(8, "little").ljust(ROW))
        ]
        if max(lengths) > _LONGEST:
            behind = self.members[lengths.index(max(lengths))]
            raise RuntimeError(
                f"rank {behind} is in another exchange\n"
                "  fix: let an error of ndtp end the program on every rank; one that is caught leaves ranks apart"
            )
        mine = np.frombuffer(said.ljust(max(lengths), b" "), np.uint8)
        told = self._gathered(mine)
        return [bytes(each[:length]).decode() for each, length in zip(told, lengths, strict=True)]

    def _sent_round(self, row: Row) -> list[Row]:
        return [bytes(each) for each in self._gathered(np.frombuffer(row, np.uint8))]

    def _gathered(self, own: Any) -> Any:
        """Rows of equal length, in as many rounds as the number of ranks has binary digits; each doubles what one has.

        Source: Bruck et al., "Efficient algorithms for all-to-all communications", 1997.
        """
        ranks, me, group = self._ranks, self._rank, self._group()
        assert group is not None
        rows = np.empty((ranks, own.shape[0]), own.dtype)
        rows[0] = own
        have, tag = 1, _TAG
        token = LABEL.set(ASIDE)
        try:
            while have < ranks:
                count = min(have, ranks - have)
                there = torch.from_numpy(rows[have : have + count].reshape(-1))
                here = torch.from_numpy(rows[:count].reshape(-1))
                source = (me + have) % ranks
                works = [group.recv([there], source, tag), group.send([here], (me - have) % ranks, tag)]
                try:
                    for work in works:
                        work.wait()
                except RuntimeError as error:
                    self._look([source])
                    raise Missing([source], f"has not come: {error}") from error
                have, tag = have + count, tag + 1
        finally:
            LABEL.reset(token)
        return np.roll(rows, me, axis=0)  # row i is that of rank me + i


class HeldElsewhere(RuntimeError):
    """Ranks do not come: they wait for this rank in other collectives.

    Attributes:
        collectives: by the global rank that waits in it.
    """

    def __init__(self, collectives: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank} waits in {text}" for rank, text in collectives.items()))
        self.collectives = collectives


_CONVERSATIONS: WeakKeyDictionary[ProcessGroup, Conversation] = WeakKeyDictionary()


def conversation_of(group: ProcessGroup, timeout: float | None) -> Conversation:
    """Return the conversation of a group; grids that share the group share it."""
    found = _CONVERSATIONS.get(group)
    if found is None:
        found = _CONVERSATIONS[group] = Conversation(group, timeout)
    return found


def _timeout_of(group: ProcessGroup) -> float:
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else _DEFAULT_TIMEOUT_S
