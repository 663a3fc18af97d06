"""Gather the next product's weight while this one computes.

The order is the one in which weights were really used: learned from the first forward, checked at every use.  A chain
ends where a weight comes again, so nothing is gathered across an optimizer step.  A weight that was changed since, or
that did not come, is gathered anew, and not gathered ahead again.  One gather is in flight at a time.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ndtp.contraction import MatMulPlan
from ndtp.moves import Move, move_of

if TYPE_CHECKING:
    from ndtp.process_grid import ProcessGrid


class _Ahead:
    """A gather that was started for a weight before its product."""

    def __init__(self, weight: Tensor, after: Tensor, move: Move) -> None:
        self.weight, self.after, self.move = weakref.ref(weight), weakref.ref(after), move
        self.version = _local(weight)._version


class WeightPrefetch:
    """What a `ProcessGrid` knows of the order of its weights in one phase, "forward" or "dgrad"."""

    def __init__(self, phase: str = "forward") -> None:
        self.phase = phase
        self._plans: Any = WeakIdKeyDictionary()  # weight -> the plan of its product
        self._next: Any = WeakIdKeyDictionary()  # weight -> reference to the one after it, or None: never
        self._chain: Any = WeakIdKeyDictionary()  # weights since the chain began
        self._last: Any = lambda: None
        self._ahead: _Ahead | None = None

    def take(self, weight: Tensor, plan: MatMulPlan) -> Move | None:
        """The gather of `weight` if it is under way; called once a product that gathers B, in order of execution."""
        if self.phase == "forward" and torch._C._current_autograd_node() is not None:
            # A checkpointed forward again, in another order.
            return None
        ahead, self._ahead = self._ahead, None
        if weight in self._chain:
            self._chain.clear()
        elif (last := self._last()) is not None and last not in self._next:
            self._next[last] = weakref.ref(weight)
        self._chain[weight], self._plans[weight], self._last = True, plan, weakref.ref(weight)
        if ahead is None:
            return None
        if ahead.weight() is weight and ahead.version == _local(weight)._version:
            return ahead.move
        ahead.move.finish()
        if (after := ahead.after()) is not None:
            self._next[after] = None
        return None

    def start(self, weight: Tensor, mesh: ProcessGrid) -> None:
        """Start the gather of the weight that follows `weight`."""
        reference = self._next.get(weight)
        following = reference and reference()
        if following is None or self._ahead is not None or following in self._chain:
            return
        plan = self._plans[following]
        move = move_of(plan, "B", _local(following).detach(), mesh, self.phase).start()
        self._ahead = _Ahead(following, weight, move)


def _local(weight: Tensor) -> Tensor:
    return getattr(weight, "_local_tensor", weight)
