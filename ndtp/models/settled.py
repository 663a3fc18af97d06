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
from ndtp.runtime.versions import version_of

MOST_SETTLED = 64  # of a layer
UNREGISTERED = object()


# A module, the name of a parameter and what it has under it; what is computed with, its attributes where it lies on a
# grid, its shard, and the dtype and shape of that.
Look = tuple[Any, ...]


class Use:
    """A parameter that a layer computes with, or None where it has none: found once, and looked at in each call."""

    __slots__ = ("local", "look", "parameter")

    def __init__(self, module: Any, name: str, parameter: Tensor | None) -> None:
        self.parameter = parameter
        self.local = local = None if parameter is None else local_of(parameter)
        form = (None, None) if local is None else (local.dtype, local.shape)
        own = None if parameter is None or parameter is local else vars(parameter)
        # Without its name the layer may have a plain tensor as attribute.
        self.look = (module, name, module._parameters.get(name, UNREGISTERED), parameter, own, local, *form)

    def stands(self) -> bool:
        """Return whether the layer would find this parameter again, and nothing of it but its numbers has changed."""
        return stand((self.look,))


def stand(looks: Sequence[Look]) -> bool:
    """Return whether parameters stand, by what `Use.look` has of each; written out: this runs for each layer of each
    step.
    """
    for module, name, registered, parameter, own, local, dtype, shape in looks:
        if module._parameters.get(name, UNREGISTERED) is not registered:
            return False
        if local is None:
            continue
        if own is not None and own.get("_dtensor", parameter)._local_tensor is not local:
            return False
        if local.dtype is not dtype or local.shape != shape:
            return False
    return True


def now_of(parameter: Tensor) -> tuple[object, ...]:
    """Return what changes when a parameter is written to; of a write through `.data` it is known that that was read."""
    own = vars(parameter)
    inner, memories = own.get("_dtensor", parameter), own.get("ndtp_memories")
    local = getattr(inner, "_local_tensor", inner)
    number, reads = memories and memories.number, own.get("ndtp_data_reads")
    try:  # as `version_of`, by no function of Python: each norm asks
        return parameter._version, inner._version, local._version, local.data_ptr(), number, reads
    except RuntimeError:  # tensors of inference
        return version_of(parameter), reads


class Settled:
    """The operation of a layer, or of several that are one product, on rows of one shape.

    Args:
        uses: of parameters.
        run: takes the rows and the shards of those parameters, None for one that a layer lacks.
        held: what lives as long, so that its id is nobody else's.
    """

    __slots__ = ("_held", "_run", "_shards", "looks")

    def __init__(self, uses: Sequence[Use], run: Callable[..., Any], held: object = None) -> None:
        self._held = held
        self.looks, self._shards, self._run = [use.look for use in uses], [use.local for use in uses], run

    def __call__(self, rows: Tensor) -> Any:
        return self._run(rows, self._shards)


class Settlements(dict[Hashable, Settled]):
    """The settled operations of a layer; a copy of the layer, whose parameters are others, begins without any."""

    def found(self, key: Hashable) -> Settled | None:
        settled = self.get(key)
        return settled if settled is not None and stand(settled.looks) else None

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
    parts = first.parts if len(members) > 1 else 1  # the result of one may be split less than its weight
    product = FewRows(first.plan, first.mesh, parts)
    widths = [local_of(weight).shape[first.features_dim] // parts for weight, _ in layers]

    def run(rows: Tensor, shards: Sequence[Tensor | None]) -> list[Tensor]:
        y = product(rows, shards[::2], shards[1::2])  # type: ignore[arg-type]
        return [y] if len(widths) == 1 else [part.contiguous() for part in y.split(widths, dim=1)]

    return settle(members, layers, key, run)


def settle(members: Sequence[Any], layers: Sequence[Any], key: Hashable, run: Callable[..., Any]) -> Settled:
    """Return the operation `run` of layers of one input, settled where they compute with their own parameters.

    Args:
        layers: weight and bias of each as they were found; what was reordered or computed is of this call alone.
        run: takes rows, and the shards of all weights and biases.
    """
    found = [uses_of(member, ("weight", "bias"), pair) for member, pair in zip(members, layers, strict=True)]
    if None not in found:
        return members[0].settled.add(key, Settled([use for uses in found for use in uses or ()], run))  # type: ignore
    both = [None if p is None else local_of(p) for pair in layers for p in pair]
    return Settled((), lambda rows, _: run(rows, both))
