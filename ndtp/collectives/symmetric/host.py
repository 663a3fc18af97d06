"""Exchanges in a host's memory: nobody waits but who wants a result, and who waits does what else can be done.

A peer's memory is read without the peer: a rank that multiplies for long holds up nobody that pulls from it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import RLock

from torch import Tensor

from ndtp.collectives.symmetric.protocol import SLOTS, Act, Do, pulling, staging
from ndtp.collectives.symmetric.windows import FREE, READY, HostWindow, check_purpose
from ndtp.errors import CommunicationError

DEFAULT_TIMEOUT_S = 1800.0  # torch's for gloo
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LOOKS_S = 2e-5, 1e-3, 0.2


class Progress:
    """All that is under way in this process, whatever its group and its grid: it goes on while anybody waits."""

    def __init__(self) -> None:
        self.busy: list[HostEngine] = []
        self.lock = RLock()  # a recorder waits in a thread of its own

    def advance(self) -> bool:
        with self.lock:
            moved = [engine.advance() for engine in self.busy]  # all of them
            self.busy = [engine for engine in self.busy if engine.is_busy]
            return any(moved)

    def until(self, is_there: Callable[[], bool], what: HostExchange) -> None:
        """Go on until `is_there()`.

        Raises:
            CommunicationError: a peer's process has ended, or nothing has happened for the timeout.
        """
        nap, since, looked = _SHORTEST_NAP_S, time.monotonic(), time.monotonic()
        while not is_there():
            if self.advance():
                nap, since = _SHORTEST_NAP_S, time.monotonic()
                continue
            if is_there():  # another thread went on
                return
            now = time.monotonic()
            if now - looked > _LOOKS_S:
                looked = now
                what.complain(now - since)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)


# What one group sends may wait for a peer that waits for another group: who waits anywhere goes on with everything.
PROCESS = Progress()


class HostEngine:
    """The exchanges of a group in one window, in order; what is sent may be ahead of what is received."""

    def __init__(self, window: HostWindow, progress: Progress, timeout: float | None = None) -> None:
        self.window, self.progress = window, progress
        self.timeout = DEFAULT_TIMEOUT_S if timeout is None else timeout
        self.count = 0
        self._sending: deque[HostExchange] = deque()
        self._receiving: deque[HostExchange] = deque()

    def exchange(
        self, sent: Sequence[Tensor], landing: Sequence[Tensor], parted: bool, purpose: int = 0
    ) -> HostExchange:
        """Send `sent[j]` to rank j, flat bytes, and receive `landing[j]` from it; of one length.

        Args:
            parted: `sent` differ; else all are the same tensor, and are staged once.
            purpose: what all ranks mean by it.
        """
        with self.progress.lock:
            started = HostExchange(self, self.count, sent, landing, parted, purpose)
            self.count += 1
            self._sending.append(started)
            self._receiving.append(started)
            self.advance()
            if self.is_busy and self not in self.progress.busy:
                self.progress.busy.append(self)
        return started

    @property
    def is_busy(self) -> bool:
        return bool(self._sending or self._receiving)

    def advance(self) -> bool:
        """Do what can be done; whether there was anything."""
        moved = False
        for queue, half in ((self._sending, 0), (self._receiving, 1)):
            while queue:
                moved |= queue[0].advance(half)
                if queue[0].left[half]:
                    break
                queue.popleft()
        return moved


class HostExchange:
    """One exchange, as a work: `wait` returns when all that is received is there; what is sent may be still waiting.

    What is sent must live until it is `staged`.
    """

    def __init__(
        self,
        engine: HostEngine,
        number: int,
        sent: Sequence[Tensor],
        landing: Sequence[Tensor],
        parted: bool,
        purpose: int,
    ) -> None:
        self.engine, self.slot = engine, number % SLOTS
        self.sent, self.landing = tuple(sent), tuple(landing)
        self.parted, self.purpose = parted, purpose
        window = engine.window
        self.left = deque(staging(window.rank, window.ranks, parted)), deque(pulling(window.rank, window.ranks))
        self.arrived: list[int] = []

    def advance(self, half: int) -> bool:
        moved, left = False, self.left[half]
        while left and self._can(left[0]):
            self._act(left.popleft())
            moved = True
        return moved

    def wait(self) -> None:
        """Raises CommunicationError: a peer has ended, or came too late, or sent something else."""
        ranks = self.engine.window.ranks
        self.engine.progress.until(lambda: len(self.arrived) == ranks and not self.left[0], self)
        self.sent = ()

    def parts(self) -> Iterator[int]:
        """The ranks whose parts have arrived, one after another, as they do."""
        told = 0

        def is_more() -> bool:
            return len(self.arrived) > told

        while told < self.engine.window.ranks:
            self.engine.progress.until(is_more, self)
            told += 1
            yield self.arrived[told - 1]

    def complain(self, idle_s: float) -> None:
        timeout = self.engine.timeout
        for half in self.left:
            if half and half[0].do in (Do.WAIT_FREE, Do.WAIT_READY):
                peer = half[0].peer
                if self.engine.window.is_gone(peer) and not self._can(half[0]):
                    raise CommunicationError(f"the process of rank {peer} of the group has ended")
                if idle_s > timeout:
                    raise CommunicationError(f"rank {peer} of the group did not come within {timeout:g} s")

    def _can(self, act: Act) -> bool:
        signal = {Do.WAIT_FREE: FREE, Do.WAIT_READY: READY}.get(act.do)
        return signal is None or self.engine.window.can_take(act.peer, self.slot, signal)

    def _act(self, act: Act) -> None:
        (do, peer), window, slot = act, self.engine.window, self.slot
        if do is Do.WAIT_FREE:
            window.take(peer, slot, FREE)
        elif do is Do.STAGE:
            window.part(window.rank, slot, self._offset(peer), self.sent[peer].numel()).copy_(self.sent[peer])
        elif do is Do.PUT_READY:
            window.put(peer, slot, READY, self.purpose)
        elif do is Do.KEEP:
            self._land(peer, self.sent[peer])
        elif do is Do.WAIT_READY:
            check_purpose(self.purpose, window.take(peer, slot, READY), peer)
        elif do is Do.PULL:
            mine = self._offset(window.rank)
            self._land(peer, window.part(peer, slot, mine, self.landing[peer].numel()))
        else:
            window.put(peer, slot, FREE)

    def _offset(self, peer: int) -> int:
        return peer * self.landing[peer].numel() if self.parted else 0

    def _land(self, peer: int, part: Tensor) -> None:
        self.landing[peer].copy_(part)
        self.arrived.append(peer)
