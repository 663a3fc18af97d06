"""Gradients of weights that wait for their all-reduce, while micro-batches are accumulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from ndtp.moves import Move


class PartialSums:
    """This rank's sums of gradients, one a weight, before the all-reduce over the axes that replicate it.

    They are never in `.grad`, where they would look finished.  Each lives as long as its weight.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._sums: Any = WeakIdKeyDictionary()  # leaf -> the move that waits, with the sum so far

    @property
    def is_accumulating(self) -> bool:
        return self._depth > 0

    @property
    def holds_back(self) -> bool:
        """Whether an all-reduce that backward comes to has to wait: for later gradients, or to take up earlier ones."""
        return self.is_accumulating or bool(self._sums)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self._depth -= 1

    def settle(self, leaf: Tensor | None, move: Move) -> Tensor | None:
        """Of a gradient that was held back: None if it is kept here, else the finished sum of all that was kept.

        Args:
            leaf: the parameter; None for a weight that is computed, whose gradient has to go on now.
        """
        if leaf is not None and self.is_accumulating:
            self._add_earlier(leaf, move)
            self._sums[leaf] = move.cast(leaf.dtype)  # autocast multiplies in another
            return None
        self.take_up(leaf, move)
        return move.finish()

    def take_up(self, leaf: Tensor | None, move: Move) -> None:
        """Start the all-reduce of a gradient that was held back, with all that was kept; not while accumulating."""
        if leaf is not None:
            if self.is_accumulating:
                return
            self._add_earlier(leaf, move)
            if self._sums:  # what this backward does not come to, it finishes at its end
                Variable._execution_engine.queue_callback(self.finish)  # type: ignore[attr-defined]
        move.go_on().start()

    def _add_earlier(self, leaf: Tensor, move: Move) -> None:
        if (waiting := self._sums.pop(leaf, None)) is not None:
            move.add(waiting.finish())

    @torch.no_grad()
    def finish(self) -> None:
        """All-reduce what waits, in the order in which it came, and add it to the `.grad` of its weight."""
        while waiting := list(self._sums.items())[:2]:
            for _, move in waiting:  # the second flies while the first is waited for
                move.go_on().start()
            leaf, move = waiting[0]
            del self._sums[leaf]
            total = move.finish().to(leaf.dtype)
            if hasattr(leaf, "_local_tensor"):
                from torch.distributed.tensor import DTensor

                total = DTensor.from_local(
                    total, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
                )
            leaf.grad = total if leaf.grad is None else leaf.grad + total

    def discard(self) -> None:
        self._sums.clear()
