"""Activations by name.  All of them act element by element, so a shard needs nothing of its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, of Primer (So et al. 2021)."""
    return F.relu(x).square()


def identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": squared_relu,
    "silu": F.silu,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
    "identity": identity,
}


def activation_named(activation: str | Activation) -> Activation:
    """The function of a name; a callable is taken as it is, and must act element by element.

    Raises:
        ValueError: an unknown name.
    """
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}; a callable works too")
    return ACTIVATIONS[activation]
