"""`SharedInput`: layers that take the same tensor, as one product whose input is gathered once."""

from __future__ import annotations

from collections.abc import Sequence
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
    device = x.device.type
    is_cast = is_autocast_on(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype


class Member(Protocol):
    """A layer that may be computed with others."""

    frame: Frame

    def product(self, members: Sequence[Any], x: Tensor) -> list[Any]:
        """Return the results of several layers of one input, by one product."""


class _Waiting:
    """Results that no layer has asked for yet.

    Attributes:
        source, state, mode: the input, what it was like, and how its product was computed; None where nothing waits.
        results: by layer.
        weights: what they were when the results were computed.
    """

    __slots__ = ("mode", "results", "source", "state", "weights")

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.state: Any = None
        self.mode: Any = None
        self.results: dict[int, Any] = {}
        self.weights: WeightsThen = ((), [], b"", ())


class SharedInput:
    """Layers of one input, as one product; results wait here for the layer that asks for its own.

    Attributes:
        are_apart: whether code has asked for results of one input in several modes: each layer has a product.
    """

    waiting = OfTurn(_Waiting)

    def __init__(self, members: Sequence[Member]) -> None:
        self.members, self.are_apart = list(members), False
        self.weights = SeenWeights(self.members)  # type: ignore[arg-type]

    def result(self, member: Member, x: Tensor) -> Any:
        mode, state, waiting = mode_of(x), state_of(x), self.waiting
        is_same = waiting.source is x
        self.are_apart |= is_same and waiting.mode != mode
        # A hook may change a weight that is used later.
        if self.are_apart or any(map(pre_hooks, self.members)):  # type: ignore[arg-type]
            return member.product([member], x)[0]
        weights = self.weights.now()
        if not is_same or waiting.state != state or id(member) not in waiting.results:
            made = member.product(self.members, x)
            waiting.source, waiting.state, waiting.mode, waiting.weights = x, state, mode, weights
            waiting.results = {id(m): y for m, y in zip(self.members, made, strict=True)}
            if mode[0]:  # decoding calls all of them
                member.frame.shared[id(self)] = self
        found, then = waiting.results.pop(id(member)), waiting.weights
        if not waiting.results:
            waiting.source = None
        return found if then[:3] == weights[:3] else member.product([member], x)[0]

    def forget(self) -> None:
        self.waiting = _Waiting()
