"""Sequence numbers of autograd under which gradients of weights arrive: for each one that no other node has."""

from __future__ import annotations

from collections import deque

import torch

from ndtp.schedule.tasks import WINDOW

RESERVE = 16  # numbers that are made when none is free: in the first products of a process


class ArrivalNumbers:
    """The numbers of one thread.

    Autograd runs the nodes that are ready by their sequence numbers, highest first.  A node that waits for a reduction
    takes a lower number than its own, that of an earlier product, so that it waits as late as it can.  Where numbers
    tie, the order depends on how many other nodes a rank has, and what follows an arrival may be a collective: of a
    computed weight, or of somebody's hook.  So every arrival leaves its own number to one that comes `WINDOW` products
    later, and no two have the same.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._left: list[int] = []  # by the weights of the product that is about to run
        self._waiting: deque[list[int]] = deque()  # those that the last products left

    def exchange(self, own: int) -> int:
        """Leave an arrival's own number, and take the one under which it is to run."""
        if not self._free:
            self._free = _reserved()
        self._left.append(own)
        return self._free.pop()

    def end_product(self) -> None:
        self._waiting.append(self._left)
        self._left = []
        if len(self._waiting) == WINDOW:
            self._free += self._waiting.popleft()


def _reserved() -> list[int]:
    with torch.enable_grad():
        x = torch.zeros((), device="cpu", requires_grad=True)
        return [x.view_as(x).grad_fn._sequence_nr() for _ in range(RESERVE)]  # type: ignore[union-attr]
