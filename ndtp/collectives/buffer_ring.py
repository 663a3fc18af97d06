"""Buffers that are used again and again: what a collective sends, or receives only to be added up or put in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.collectives.streams import has_streams, is_capturing

DEFAULT_BYTES = 256 * 2**20
SMALLEST = 64 * 1024  # bytes; the allocator serves smaller ones as fast as a ring does

# (bytes, device) -> memory, uint8
Allocate = Callable[[int, torch.device], Tensor]


class BufferRing:
    """A bounded number of bytes, lent and given back.

    Only for memory that nobody keeps.  A result is never lent: autograd saves it, or accumulates into it.

    What is lent depends on the order of the calls and on nothing else, so that the ranks of a grid, which run the same
    schedule, lend alike: NCCL wants a buffer registered on every rank of a collective or on none.

    On CUDA a buffer remembers the work that was enqueued when it came back, and the stream that borrows it next waits
    for that.  While a graph is captured nothing is lent: a replay would use the buffers behind the ring's back.

    Args:
        limit_bytes: of memory, lent or waiting.  What does not fit is allocated anew and not kept.
        allocate: where memory comes from; default: torch's allocator.
    """

    def __init__(self, limit_bytes: int = DEFAULT_BYTES, allocate: Allocate | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate or _empty
        self._waiting: list[_Buffer] = []  # longest first
        self._lent: dict[int, _Buffer] = {}  # by address

    @property
    def lent_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in list(self._lent.values()))

    @property
    def waiting_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self._waiting)

    def borrow(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous tensor of that shape, with the dtype and device of `like` and arbitrary content."""
        num_bytes = math.prod(shape) * like.element_size()
        if num_bytes < SMALLEST or not _has_memory(like) or is_capturing(like.device.type):
            return like.new_empty(shape)
        buffer = self._next(size_class(num_bytes), like.device)
        if buffer is None:
            return like.new_empty(shape)
        self._lent[buffer.memory.data_ptr()] = buffer
        return buffer.memory[:num_bytes].view(like.dtype).view(shape)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Take back what was lent, when the current stream has been given all work on it; leave other tensors alone."""
        for buffer in self._found(tensors):
            if not is_capturing(buffer.memory.device.type):
                buffer.release()
                self._waiting.append(buffer)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Never lend these again: something may still write to them."""
        self._found(tensors)

    def _found(self, tensors: Iterable[Tensor]) -> list[_Buffer]:
        if not self._lent:
            return []
        found = [self._lent.pop(x.data_ptr(), None) for x in tensors if _has_memory(x)]
        return [buffer for buffer in found if buffer is not None]

    def _next(self, num_bytes: int, device: torch.device) -> _Buffer | None:
        for i, buffer in enumerate(self._waiting):
            if buffer.num_bytes == num_bytes and buffer.memory.device == device:
                del self._waiting[i]
                buffer.acquire()
                return buffer
        if self.lent_bytes + num_bytes > self.limit_bytes:
            return None
        while self.lent_bytes + self.waiting_bytes + num_bytes > self.limit_bytes:
            self._waiting.pop(0).discard()  # of a size that is not in use any more
        # A buffer made under inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return _Buffer(self._allocate(num_bytes, device))


class _Buffer:
    """Memory, and on CUDA the stream and the event of its release."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.num_bytes = memory.numel()
        ordered = has_streams(memory.device.type)
        self._event: Any = torch.cuda.Event() if ordered else None
        self._home = self._stream = torch.cuda.current_stream(memory.device) if ordered else None

    def release(self) -> None:
        if self._event is not None:
            self._stream = torch.cuda.current_stream(self.memory.device)
            self._event.record(self._stream)

    def acquire(self) -> None:
        if self._event is not None:
            stream = torch.cuda.current_stream(self.memory.device)
            if stream != self._stream:
                stream.wait_event(self._event)

    def discard(self) -> None:
        """Discard the memory before it goes back to the allocator, which orders it by the stream that it was made
        on.
        """
        if self._stream != self._home:
            self.memory.record_stream(self._stream)  # type: ignore[arg-type]


def size_class(num_bytes: int) -> int:
    """Bytes that a buffer has: at most an eighth more than are asked for, so that similar sizes share buffers."""
    step = max(512, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _has_memory(x: Tensor) -> bool:
    """Return whether a tensor has memory; meta tensors, fake ones and other wrappers have none and are left to
    torch.
    """
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type in ("cpu", "cuda")
