"""Layers of a step without gradients that repeats itself: what was found of their parameters in the first one.

Decoding calls each layer with rows of the same shape, once a token.  Which parameter a layer computes with (its own, or
what hooks, a parametrization or `torch.func` have put in its place), whether it lies as the layer wants it and which
collectives follow is found in the first of these calls, and holds while the parameter is the same object with the same
memory.  Where anything else was computed with, nothing is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from ndtp.ops.few_rows import FewRows, takes_few_rows
from ndtp.runtime.arrival import local_of

MOST_SETTLED = 64  # of a layer
UNREGISTERED = object()


class Use:
    """A parameter that a layer computes with, or None where it has none: found once, and looked at in each call."""

    __slots__ = ("dtype", "local", "module", "name", "parameter", "registered", "shape")

    def __init__(self, module: Any, name: str, parameter: Tensor | None) -> None:
        self.module, self.name, self.parameter = module, name, parameter
        self.registered = module._parameters.get(name, UNREGISTERED)
        self.local = None if parameter is None else local_of(parameter)
        self.dtype = None if self.local is None else self.local.dtype
        self.shape = None if self.local is None else self.local.shape

    def stands(self) -> bool:
        """Return whether the layer would find this parameter again, and nothing of it but its numbers has changed."""
        parameter, local = self.parameter, self.local
        # Without its name the layer may have a plain tensor as attribute.
        if self.module._parameters.get(self.name, UNREGISTERED) is not self.registered:
            return False
        if parameter is None or local is None:
            return True
        is_same = parameter is local or parameter._local_tensor is local  # type: ignore[attr-defined]
        return is_same and local.dtype is self.dtype and local.shape == self.shape


class Settled:
    """The operation of a layer, or of several that are one product, on rows of one shape.

    Args:
        uses: of parameters.
        run: takes the rows and the shards of those parameters, None for one that a layer lacks.
    """

    __slots__ = ("_run", "_uses")

    def __init__(self, uses: Sequence[Use], run: Callable[..., Any]) -> None:
        self._uses, self._run = tuple(uses), run

    def stands(self) -> bool:
        stands = True
        for use in self._uses:  # written out: this runs for each layer of each step
            stands = stands and use.stands()
        return stands

    def __call__(self, rows: Tensor) -> Any:
        return self._run(rows, [use.local for use in self._uses])


class Settlements(dict[Hashable, Settled]):
    """The settled operations of a layer; a copy of the layer, whose parameters are others, begins without any."""

    def found(self, key: Hashable) -> Settled | None:
        settled = self.get(key)
        return settled if settled is not None and settled.stands() else None

    def add(self, key: Hashable, settled: Settled) -> Settled:
        if len(self) >= MOST_SETTLED:
            self.clear()
        self[key] = settled
        return settled

    def __deepcopy__(self, memo: object) -> Settlements:
        return Settlements()


def uses_of(module: Any, names: Sequence[str], found: Sequence[Any]) -> list[Use] | None:
    """Return the uses of a layer's parameters, where it was found to compute with its own ones; else None."""
    uses: list[Use] = []
    for name, parameter in zip(names, found, strict=True):
        own: object = module._parameters.get(name)
        if parameter is not own or (own is not None and name not in module.lies):
            return None
        uses.append(Use(module, name, own))
    return uses


def settled_product(members: Sequence[Any], rows: Tensor) -> Settled | None:
    """Return what some projections of one input do with few rows; None where these are no rows of decoding."""
    first = members[0]
    if not takes_few_rows(rows, (first.plan,), first.mesh):
        return None
    key = (rows.shape, rows.dtype, first.mesh.collectives, *members)
    return first.settled.found(key) or _settle(members, rows, key)


def _settle(members: Sequence[Any], rows: Tensor, key: Hashable) -> Settled | None:
    first = members[0]
    for member in members:
        weight: Any = member._parameters.get("weight")
        if weight is None or weight.dtype != rows.dtype or weight.device != rows.device:
            return None  # the program says why it does not fit
    layers = [member.weight_and_bias(rows) for member in members]
    weights, biases = [local_of(weight) for weight, _ in layers], [b if b is None else local_of(b) for _, b in layers]
    found = [uses_of(member, ("weight", "bias"), pair) for member, pair in zip(members, layers, strict=True)]
    parts = first.parts if len(members) > 1 else 1  # the result of one may be split less than its weight
    product = FewRows(first.plan, first.mesh, parts)
    widths = [weight.shape[first.features_dim] // parts for weight in weights]

    def run(rows: Tensor, shards: Sequence[Tensor | None]) -> list[Tensor]:
        y = product(rows, shards[::2], shards[1::2])  # type: ignore[arg-type]
        return [y] if len(widths) == 1 else [part.contiguous() for part in y.split(widths, dim=1)]

    if None not in found:
        return first.settled.add(key, Settled([use for uses in found for use in uses or ()], run))
    both = [x for pair in zip(weights, biases, strict=True) for x in pair]  # reordered, or computed: of this call alone
    return Settled((), lambda rows, _: run(rows, both))
