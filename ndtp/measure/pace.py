"""Local work that takes time and computes nothing: a clock in the place of a device.

Products, activations and sums allocate their results and sleep for as long as a device would work at them.  What runs
is the library's own program, on real ranks, with real collectives; the processor is left to these, as a GPU leaves it.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ndtp.collectives.gloo import GlooCollectives
from ndtp.collectives.handles import Begin, Channel, Shape, Started
from ndtp.compute.activations import width_of
from ndtp.compute.gemm import Letters, Multiply, TorchGemm
from ndtp.planner.hardware import Hardware

# What waking up late may take off the work that follows: a device would have begun that by itself.
MOST_CREDIT = 2e-3
_SET_TIMER_SLACK = 29  # of Linux' prctl: how late a thread may be woken up, in ns; by default 50 us


@dataclass
class Clock:
    """A clock of the local work that this rank has done.

    Args:
        flops_per_byte: what a byte of memory that is read or written counts.
        rate: flops per second; 0: nothing lasts, and work is counted all the same.

    Attributes:
        work: flops, since it was set to zero.
    """

    flops_per_byte: float
    rate: float = 0.0
    work: float = 0.0
    _owed: float = 0.0

    @classmethod
    def of(cls, hardware: Hardware, dtype: str) -> Clock:
        """Return the clock of a device with a given ratio of arithmetic to memory; the speed of both is left open.

        Raises:
            GridError: the profile has no rate for that dtype.
        """
        return cls(hardware.flops_per_second(dtype) / (hardware.memory_gbs * 1e9))

    def multiply(self, flops: float) -> None:
        self._pass(flops)

    def touch(self, *tensors: Tensor) -> None:
        """Element by element work on tensors, each of which is read or written once."""
        self._pass(sum(x.nbytes for x in tensors) * self.flops_per_byte)

    def _pass(self, work: float) -> None:
        self.work += work
        if not self.rate:
            return
        begin = time.perf_counter()
        self._owed += work / self.rate
        if self._owed > 0:
            time.sleep(self._owed)
        self._owed = max(self._owed - (time.perf_counter() - begin), -MOST_CREDIT)


def wake_up_in_time() -> None:
    """Have this thread woken up when its sleep is over, not some time after it; where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


class PacedGemm(TorchGemm):
    """Products and activations of a clock's device, whose results are memory as it was found."""

    takes_processors = False

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def bound(
        self,
        letters: tuple[Letters, Letters, Letters],
        one: Shape,
        other: Shape,
        *,
        blocks: int | None = None,
        parts: Sequence[int] | None = None,
        accumulate: bool = False,
    ) -> Multiply:
        product = super().bound(letters, one, other, blocks=blocks, parts=parts, accumulate=accumulate)
        flops = 2.0 * math.prod({**_sizes(letters[0], one), **_sizes(letters[1], other)}.values())
        if parts is not None:
            flops *= len(parts) / (one if len(one) == 3 else other)[0]
        shape: Shape = ()
        if not accumulate:  # else into what is there
            shape = tuple(product(torch.empty(one, device="meta"), torch.empty(other, device="meta")).shape)
        clock = self.clock

        def run(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
            clock.multiply(flops)
            return a.new_empty(shape) if out is None else out

        return run

    def activate(self, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        result = pre.new_empty((*pre.shape[:-1], pre.shape[-1] // width_of(name))) if out is None else out
        self.clock.touch(pre, result)
        return result

    def activate_backward(self, grad: Tensor, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        for _ in range(3):  # as the time model has it
            self.clock.touch(grad, pre)
        return torch.empty_like(pre) if out is None else out


def _sizes(letters: Letters, shape: Shape) -> dict[str | None, int]:
    """Return the sizes of a tensor's letters; a matrix may lie as blocks of columns."""
    if len(letters) == 2 and len(shape) == 3:
        shape = (shape[1], shape[0] * shape[2])
    return dict(zip(letters, shape, strict=False))


class PacedCollectives(GlooCollectives):
    """gloo's collectives, whose sums a clock's device adds up."""

    clock: Clock

    def _reduce(self, to: Channel, ranks: int, shape: Shape) -> Begin:
        def begin(sent: Tensor, out: Tensor | None) -> Started:
            received = self.ring.borrow(sent.shape, sent)
            work = self._exchange(received, sent, to, ranks > 2)

            def finish() -> Tensor:
                summed = sent.new_empty(shape) if out is None else out
                self.clock.touch(received, summed)
                return summed

            return work, finish, (sent, received), (received,)

        return begin
