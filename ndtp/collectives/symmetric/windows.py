"""Memory of every rank that its peers read, and the signals between them, in a host's shared memory or in one process.

`DeviceWindow` in `ndtp.collectives.symmetric.device` is the same on GPUs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.collectives.symmetric.protocol import SLOTS
from ndtp.errors import CommunicationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FREE, READY = 0, 1  # signals
ORDERED = ("x86_64", "AMD64")  # processors whose stores are seen in the order in which they were made
_PAD_WORDS = SLOTS * 3  # of every peer: two signals, and what a slot was filled for


class WindowMemory(NamedTuple):
    """One rank's part of a window: what it stages, and what its peers signal to it, [ranks, SLOTS, 3] int64."""

    slots: Tensor  # [SLOTS, bytes] uint8
    pad: Any


class HostWindow:
    """The memory of all ranks of a group, as one of them uses it.  Nothing waits here: `can_take` asks.

    A signal is a count, of which there is one writer: how often the peer has put it, in the memory of the rank that
    takes it.
    """

    def __init__(self, rank: int, memories: Sequence[WindowMemory], processes: Sequence[int] | None = None) -> None:
        self.rank, self.ranks = rank, len(memories)
        self.memories, self.processes = memories, processes
        self.slot_bytes = memories[rank].slots.shape[1]
        self._put = np.zeros((self.ranks, SLOTS, 2), np.int64)
        self._taken = np.zeros((self.ranks, SLOTS, 2), np.int64)
        self._taken[:, :, FREE] = -1  # every slot is free at the beginning

    def part(self, owner: int, slot: int, start: int, num_bytes: int) -> Tensor:
        return self.memories[owner].slots[slot, start : start + num_bytes]

    def put(self, peer: int, slot: int, signal: int, purpose: int = 0) -> None:
        self._put[peer, slot, signal] += 1
        mine = self.memories[peer].pad[self.rank, slot]
        if signal == READY:
            mine[2] = purpose
        mine[signal] = self._put[peer, slot, signal]  # last: it says that all before it is there

    def can_take(self, peer: int, slot: int, signal: int) -> bool:
        return bool(self.memories[self.rank].pad[peer, slot, signal] > self._taken[peer, slot, signal])

    def take(self, peer: int, slot: int, signal: int) -> int:
        """Returns what the slot was filled for."""
        self._taken[peer, slot, signal] += 1
        return int(self.memories[self.rank].pad[peer, slot, 2])

    def is_gone(self, peer: int) -> bool:
        """Return whether the peer's process has ended."""
        return self.processes is not None and not is_alive(self.processes[peer])


def windows_in_process(ranks: int, slot_bytes: int) -> list[HostWindow]:
    """Return the windows of all ranks, each of which is this process."""
    memories = [_memory(torch.zeros(_size(ranks, slot_bytes), dtype=torch.uint8), ranks) for _ in range(ranks)]
    return [HostWindow(rank, memories) for rank in range(ranks)]


def shared_window(group: ProcessGroup, slot_bytes: int) -> HostWindow:
    """A window in shared memory; a collective of the group.

    Raises:
        CommunicationError: on every rank, if one of them has no room for it, or does not find that of another.
    """
    ranks, rank, size = group.size(), group.rank(), _size(group.size(), slot_bytes)
    path, problem = "", ""
    try:
        path = _reserved(size)
    except OSError as error:
        problem = f"{size:,} bytes of shared memory: {error}"
    mapped: list[Tensor] = []
    try:
        told = _told_all(group, (path, os.getpid(), problem))
        if not any(each[2] for each in told):
            try:
                mapped = [torch.from_file(each[0], shared=True, size=size, dtype=torch.uint8) for each in told]
                lost = [each[1] for each in told if not is_alive(each[1])]
                problem = f"process {lost[0]} of a peer cannot be seen from here" if lost else ""
            except (OSError, RuntimeError) as error:
                problem = f"the memory of a peer: {error}"
            told = [(*each[:2], other) for each, other in zip(told, _told_all(group, problem), strict=True)]
    finally:
        with suppress(OSError):
            os.unlink(path)  # mapped memory stays until the last process lets go of it
    found = [f"rank {i} of the group: {each[2]}" for i, each in enumerate(told) if each[2]]
    if found:
        raise CommunicationError(
            f"collectives='symmetric': no window of {slot_bytes:,} bytes a slot\n  "
            + "\n  ".join(found)
            + "\n  fix: more shared memory (/dev/shm; docker run --shm-size), or collectives='torch'"
        )
    return HostWindow(rank, [_memory(each, ranks) for each in mapped], [each[1] for each in told])


def unusable_host() -> str:
    """Return the reason why this host's shared memory cannot serve; empty if it can."""
    import platform

    if platform.machine() not in ORDERED:
        return f"a processor ({platform.machine()}) whose stores may be seen out of order"
    return ""


def machine() -> str:
    """Return a text that ranks of one machine share, and others do not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import platform

        return platform.node()


def _told_all(group: ProcessGroup, mine: str | tuple[str, int, str]) -> list[Any]:
    everybody: list[object] = [None] * group.size()
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def _reserved(size: int) -> str:
    """A file in memory, all of it there: what is missing later would end the process."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, path = tempfile.mkstemp(prefix=f"ndtp_{os.getpid()}_", dir=folder)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return path


def _size(ranks: int, slot_bytes: int) -> int:
    return ranks * _PAD_WORDS * 8 + SLOTS * slot_bytes


def _memory(raw: Tensor, ranks: int) -> WindowMemory:
    pad_bytes = ranks * _PAD_WORDS * 8
    pad = raw[:pad_bytes].view(torch.int64).view(ranks, SLOTS, 3).numpy()
    return WindowMemory(raw[pad_bytes:].view(SLOTS, -1), pad)


def is_alive(process: int) -> bool:
    """Return whether a process of this machine has not ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")  # no /proc: nobody can tell
    except OSError:
        return False  # it ended while it was read
    return status.rpartition(")")[2].split()[0] not in "ZX"


def check_purpose(expected: int, found: int, peer: int) -> None:
    """Raises CommunicationError where a peer has sent something else than what is received."""
    if expected != found:
        raise CommunicationError(
            f"rank {peer} of the group runs another collective here: they are not the same on all ranks\n"
            "  fix: ProcessGrid(check=True) names the product"
        )
