"""What ranks do differently: side graphs, hooks, logging, garbage and its collection.  It may change no result."""

from __future__ import annotations

import gc
import random
from typing import Any

import torch
from torch import Tensor

HOOKING = ("tensor hook", "nested backward", "retain grad")


class Noise:
    """One rank's own doings between units, drawn from a generator of its own.

    Args:
        kinds: of `program.NOISES`; none is quiet.
    """

    def __init__(self, kinds: tuple[str, ...], seed: int, rank: int) -> None:
        self.kinds = kinds
        self.rng = random.Random(f"{seed} of rank {rank}")
        self.side: list[Tensor] = []  # to be added to the loss, times zero
        self.garbage: list[Any] = []
        self.logged: list[float] = []

    def __deepcopy__(self, memo: object) -> Noise:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Do something, or nothing, at an activation; returns it, perhaps by way of other nodes."""
        for kind in self.kinds:
            if self.rng.random() < 0.4:
                x = self._do(kind, x)
        return x

    def _do(self, kind: str, x: Tensor) -> Tensor:
        if kind in HOOKING and hasattr(type(x), "now"):
            return x  # who asks for a gradient inside of a program takes it apart, on every rank or on none
        if kind == "aux":
            self.side.append(self._aux(x))
        elif kind == "touch":
            for _ in range(self.rng.randint(1, 4)):
                # Whether an operand wants a gradient is part of a call, and the same on every rank.
                # The gradient of a number that is added to a split tensor is a sum over ranks: all of them add one.
                adds = x.requires_grad and _own(x) is x and self.rng.random() < 0.5
                x = x + 0 * self._aux(x) if adds else x.clone()
        elif kind == "collect":
            gc.collect()
        elif kind == "cycle":
            self.keep(x)
        elif kind == "retain grad":
            if x.requires_grad and not x.is_leaf:
                x.retain_grad()
        elif kind == "private backward":
            private_backward(self.rng)
        elif kind == "log":
            self.logged.append(float(_own(x).detach().double().sum()))
        elif kind == "no grad":
            with torch.no_grad():
                self.logged.append(float(self._aux(x)))
        elif kind in ("tensor hook", "nested backward") and x.requires_grad:
            nested = kind == "nested backward"
            x.register_hook(lambda grad: self._in_backward(nested))
        return x

    def _in_backward(self, nested: bool) -> None:
        if nested:
            private_backward(self.rng)
        elif self.rng.random() < 0.3:
            gc.collect()

    def _aux(self, x: Tensor) -> Tensor:
        x = _own(x)
        if self.rng.random() < 0.5 or not x.requires_grad:
            x = torch.ones(3, dtype=x.dtype, requires_grad=True)
        for _ in range(self.rng.randint(1, 12)):
            x = torch.tanh(x)
        return x.sum()

    def keep(self, *things: Any) -> None:
        """Make garbage of things that reference each other; it goes whenever the collector comes by."""
        cycle: list[Any] = list(things)
        cycle.append(cycle)
        if self.rng.random() < 0.5:
            self.garbage.append(cycle)
        if self.rng.random() < 0.3:
            self.garbage.clear()

    def loss(self, loss: Tensor) -> Tensor:
        """The loss with this rank's side graphs, in front of it or behind it."""
        for aux in self.side:
            loss = loss + 0 * aux if self.rng.random() < 0.5 else 0 * aux + loss
        self.side.clear()
        if "dropped graph" in self.kinds and self.rng.random() < 0.5:
            self.garbage.append(loss * 2)
        return loss


def private_backward(rng: random.Random) -> None:
    """A backward that has nothing to do with the model's."""
    with torch.inference_mode(False), torch.enable_grad():
        b = a = torch.ones(2, requires_grad=True)
        for _ in range(rng.randint(1, 8)):
            b = b * 1.1
        b.sum().backward()
    assert a.grad is not None


def _own(x: Tensor) -> Tensor:
    """`x`, or where it is split, which no rank reads alone, something else."""
    return x if type(x) is Tensor else torch.ones(3, dtype=x.dtype)
