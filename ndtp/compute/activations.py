"""Activations by name.  They act element by element or on pairs of them, so a shard needs nothing of its neighbours."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ndtp.compute.epilogues import ACTIVATIONS

ActivationFunction = Callable[[Tensor], Tensor]


def width_of(activation: str | ActivationFunction) -> int:
    """Features that an activation takes for each that it gives: 2 for a gated one, by name."""
    return ACTIVATIONS[activation].width if isinstance(activation, str) and activation in ACTIVATIONS else 1


def activation_named(activation: str | ActivationFunction) -> ActivationFunction:
    """The function of a name; a callable is taken as it is, and must act element by element.

    Raises:
        ValueError: an unknown name.
    """
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}; a callable works too")
    return ACTIVATIONS[activation].forward
