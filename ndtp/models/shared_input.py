"""`SharedInput`: layers that take the same tensor, as one product whose input is gathered once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ndtp.compute.traces import is_autocast_on
from ndtp.models.frame import Frame
from ndtp.models.seen_weights import SeenWeights, WeightsThen
from ndtp.runtime.of_turn import OfTurn
from ndtp.split.copies import state_of

pre_hooks = attrgetter("_forward_pre_hooks")


def mode_of(x: Tensor) -> tuple[bool, bool, torch.dtype | None]:
    """Return what decides, beside the numbers, what a product gives: whether it has a gradient, whether autograd may
    ever see it, and its dtype.
    """
    is_cast = torch._C._is_any_autocast_enabled() and is_autocast_on(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if is_cast else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype


def is_saved_by_hooks() -> bool:
    """Return whether hooks decide what autograd keeps, as those of a checkpoint do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class Member(Protocol):
    """A layer that may be computed with others."""

    frame: Frame
    name: str

    def product(self, members: Sequence[Any], x: Tensor) -> list[Any]:
        """Return the results of several layers of one input, by one product."""


class _Waiting:
    """Results that no layer has asked for yet.

    Attributes:
        source, state, mode: the input, what it was like, and how its product was computed; None where nothing waits.
        results: by layer.
        weights: by layer, its own, and what they were when the results were computed.
    """

    __slots__ = ("mode", "results", "source", "state", "weights")

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.state: Any = None
        self.mode: Any = None
        self.results: dict[int, Any] = {}
        self.weights: dict[int, tuple[SeenWeights, WeightsThen]] = {}


class SharedInput:
    """Layers of one input, as one product; results wait here for the layer that asks for its own.

    Attributes:
        are_apart: whether code has asked for results of one input in several modes: each layer has a product.
    """

    waiting = OfTurn(_Waiting)

    def __init__(self, members: Sequence[Member]) -> None:
        self.members, self.are_apart = list(members), False
        self.weights = [SeenWeights([each]) for each in self.members]  # type: ignore[list-item]

    def result(self, member: Member, x: Tensor, product: Callable[..., Sequence[object]] | None = None) -> Any:
        """Return the result of one of the layers.

        Args:
            product: of several layers and their input, where it is not the one that `Member.product` chooses.
        """
        product = product or member.product
        mode, state, waiting = mode_of(x), state_of(x), self.waiting
        is_same = waiting.source is x
        self.are_apart |= is_same and waiting.mode != mode
        # A hook may change a weight that is used later.
        if self.are_apart or any(map(pre_hooks, self.members)):  # type: ignore[arg-type]
            return product([member], x)[0]
        key = id(member)
        if not is_same or waiting.state != state or key not in waiting.results:
            members = self._beside(member) if is_saved_by_hooks() else self.members
            waiting.weights = {
                id(m): (weights, weights.now())
                for m, weights in zip(self.members, self.weights, strict=True)
                if m is not member and m in members
            }
            made = product(members, x)
            waiting.source, waiting.state, waiting.mode = x, state, mode
            waiting.results = {id(m): y for m, y in zip(members, made, strict=True)}
            if mode[0]:  # decoding calls all of them
                member.frame.shared[id(self)] = self
            return self._taken(waiting, key)
        now = waiting.weights.pop(key, None)
        is_own = now is not None and now[0].now()[:3] == now[1][:3]
        found = self._taken(waiting, key)
        return found if is_own else product([member], x)[0]

    def _beside(self, member: Member) -> list[Member]:
        """Return the layers of one module: a checkpoint, which computes one module again, holds no other's results."""
        own = member.name.rpartition(".")[0]
        return [each for each in self.members if each.name.rpartition(".")[0] == own]

    def _taken(self, waiting: _Waiting, key: int) -> Any:
        found = waiting.results.pop(key)
        if not waiting.results:
            waiting.source = None
        return found

    def forget(self) -> None:
        self.waiting = _Waiting()
