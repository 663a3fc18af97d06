"""Symmetric memory without a device: torch's handle, whose peers are memory of this process that nobody fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHANNELS = 64


class SymmetricHandle:
    """torch's `_SymmetricMemory` of a group: buffers of all ranks, and signals that only take their place in order."""

    def __init__(self, machine: Any, memory: Tensor, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._machine = machine
        self._memories = [memory if rank == self.rank else torch.zeros_like(memory) for rank in range(self.world_size)]
        self._pads = torch.zeros(2, self.world_size, _CHANNELS, dtype=torch.int32)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """See torch; the offset counts elements."""
        count = torch.Size(sizes).numel()
        return self._memories[rank].view(dtype)[storage_offset : storage_offset + count].view(sizes)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """See torch."""
        self._machine.kernel("put_signal", writes=[self._pads[0, dst_rank, channel : channel + 1]])

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """See torch; every signal is there at once."""
        self._machine.kernel("wait_signal", writes=[self._pads[1, src_rank, channel : channel + 1]])


def patches(machine: Any) -> Iterator[tuple[object, str, object]]:
    """Yield what stands in for torch's functions of symmetric memory."""
    from torch.distributed import _symmetric_memory

    def empty(size: int, *, dtype: torch.dtype, device: Any = None) -> Tensor:
        machine.refuse_in_capture("an allocation of symmetric memory")
        return torch.empty(size, dtype=dtype)

    def rendezvous(memory: Tensor, group: Any) -> SymmetricHandle:
        machine.refuse_in_capture("a rendezvous of symmetric memory")
        return SymmetricHandle(machine, memory, group)

    yield _symmetric_memory, "empty", empty
    yield _symmetric_memory, "rendezvous", rendezvous
