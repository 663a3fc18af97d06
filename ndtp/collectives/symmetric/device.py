"""Exchanges between GPUs: copies on a stream of their own, by copy engines, and signals between them.

`DeviceWindow` is `torch.distributed._symmetric_memory`: memory of all ranks of a group that every one of them can
address, and pads of signals.  `LocalWindow` is the same on one device, of which this process is every rank.  Written to
torch's source; the signatures are checked without a device, nothing was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ndtp.collectives import nccl
from ndtp.collectives.symmetric.protocol import SLOTS, Act, Do, pulling, staging
from ndtp.collectives.symmetric.windows import FREE, READY

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Window(Protocol):
    """The memory of all ranks as an engine uses it. Signals are put and taken in the order of the current stream."""

    rank: int
    ranks: int
    slot_bytes: int

    def part(self, owner: int, slot: int, start: int, num_bytes: int) -> Tensor: ...

    def put(self, peer: int, slot: int, signal: int) -> None: ...

    def take(self, peer: int, slot: int, signal: int) -> None: ...


class DeviceWindow:
    """torch's symmetric memory of a group.

    Args:
        handle: what `rendezvous` gave.
        memory: of this rank, which the handle does not hold.
        timeout: seconds after which a signal that does not come ends the program, on the device; None: never.
    """

    def __init__(self, handle: Any, memory: Tensor, slot_bytes: int, timeout: float | None = None) -> None:
        self.handle, self.memory, self.slot_bytes = handle, memory, slot_bytes
        self.rank, self.ranks = handle.rank, handle.world_size
        self._timeout_ms = 0 if timeout is None else max(1, round(timeout * 1e3))
        for slot in range(SLOTS):  # every slot is free at the beginning
            for peer in range(self.ranks):
                if peer != self.rank:
                    self.put(peer, slot, FREE)

    @classmethod
    def of(cls, group: ProcessGroup, slot_bytes: int, timeout: float | None) -> DeviceWindow:
        """A new one; a collective of the group."""
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=nccl.device())
        return cls(_symmetric_memory.rendezvous(memory, group), memory, slot_bytes, timeout)

    def part(self, owner: int, slot: int, start: int, num_bytes: int) -> Tensor:
        found: Tensor = self.handle.get_buffer(owner, (num_bytes,), torch.uint8, slot * self.slot_bytes + start)
        return found

    def put(self, peer: int, slot: int, signal: int) -> None:
        self.handle.put_signal(peer, 2 * slot + signal, self._timeout_ms)

    def take(self, peer: int, slot: int, signal: int) -> None:
        self.handle.wait_signal(peer, 2 * slot + signal, self._timeout_ms)


class LocalWindow:
    """All ranks on one device; signals by kernels of one warp, as torch's are."""

    def __init__(self, rank: int, memories: Sequence[Tensor], pads: Sequence[Tensor]) -> None:
        from ndtp_kernels import signals

        self.rank, self.ranks, self.slot_bytes = rank, len(memories), memories[rank].shape[1]
        self.memories, self.pads, self._signals = memories, pads, signals

    @staticmethod
    def of_all(ranks: int, slot_bytes: int, device: torch.device) -> list[LocalWindow]:
        memories = [torch.empty(SLOTS, slot_bytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
        pads = [torch.zeros(ranks, SLOTS, 2, dtype=torch.int32, device=device) for _ in range(ranks)]
        for pad in pads:
            pad[:, :, FREE] = 1
        return [LocalWindow(rank, memories, pads) for rank in range(ranks)]

    def part(self, owner: int, slot: int, start: int, num_bytes: int) -> Tensor:
        return self.memories[owner][slot, start : start + num_bytes]

    def put(self, peer: int, slot: int, signal: int) -> None:
        self._signals.put_signal(self.pads[peer][self.rank, slot, signal])

    def take(self, peer: int, slot: int, signal: int) -> None:
        self._signals.take_signal(self.pads[self.rank][peer, slot, signal])


class DeviceEngine:
    """The exchanges of a group in one window, one behind another on one stream, as a communicator's are."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.stream = torch.cuda.Stream(priority=-1)
        self.count = 0

    def exchange(
        self, sent: Sequence[Tensor], landing: Sequence[Tensor], parted: bool, purpose: int = 0
    ) -> DeviceExchange:
        """See `ndtp.collectives.symmetric.host.HostEngine.exchange`."""
        started = self.stage(sent, landing, parted)
        self.pull(started)
        return started

    def stage(self, sent: Sequence[Tensor], landing: Sequence[Tensor], parted: bool) -> DeviceExchange:
        """The first half of an exchange.

        One process that is several ranks of one device issues this half of all of them, and then the other: streams may
        share a queue of the device, in which nothing must stand before what it waits for.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        started = DeviceExchange(self.count % SLOTS, tuple(sent), tuple(landing), parted, [], torch.cuda.Event())
        self.count += 1
        with torch.cuda.stream(self.stream):
            for act in staging(self.window.rank, self.window.ranks, parted):
                self._act(started, act)
        return started

    def pull(self, started: DeviceExchange) -> None:
        with torch.cuda.stream(self.stream):
            for act in pulling(self.window.rank, self.window.ranks):
                self._act(started, act)
            started.done.record()

    def _act(self, this: DeviceExchange, act: Act) -> None:
        (do, peer), window = act, self.window
        if do is Do.WAIT_FREE:
            window.take(peer, this.slot, FREE)
        elif do is Do.STAGE:
            size = this.sent[peer].numel()
            window.part(window.rank, this.slot, peer * size if this.parted else 0, size).copy_(this.sent[peer])
        elif do is Do.PUT_READY:
            window.put(peer, this.slot, READY)
        elif do is Do.KEEP:
            this.land(peer, this.sent[peer])
        elif do is Do.WAIT_READY:
            window.take(peer, this.slot, READY)
        elif do is Do.PULL:
            size = this.landing[peer].numel()
            this.land(peer, window.part(peer, this.slot, window.rank * size if this.parted else 0, size))
        else:
            window.put(peer, this.slot, FREE)


class DeviceExchange(NamedTuple):
    """An exchange that behaves as NCCL's work does: waiting blocks the current stream.

    Attributes:
        events: of every part, in the order of arrival: the rank, and what a stream can wait for.
        done: behind the last signal, which a graph must wait for as well as for the parts.
    """

    slot: int
    sent: tuple[Tensor, ...]
    landing: tuple[Tensor, ...]
    parted: bool
    events: list[tuple[int, torch.cuda.Event]]
    done: torch.cuda.Event

    def land(self, peer: int, part: Tensor) -> None:
        self.landing[peer].copy_(part, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.events.append((peer, event))

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)

    def parts(self) -> Iterator[int]:
        for peer, event in self.events:
            torch.cuda.current_stream().wait_event(event)
            yield peer


def unusable_device() -> str:
    """Return the reason why this rank's GPU cannot address its peers'; empty if it can."""
    own = nccl.device().index
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    blind = [i for i in others if not torch.cuda.can_device_access_peer(own, i)]
    return f"device {own} cannot address device {blind[0]}" if blind else ""
