"""`SeenWeights`: the parameters of layers that were called, and whether they are still those with which the call was
made.

Several layers run as one program, or as one product, so a layer may be computed later, or earlier, than it is called.
A model's forward may change its weights between the two: noise that is added for one call, a tensor that
`torch.func.functional_call` puts in their place, parameters that are frozen for a part of the forward.  Then the layer
is computed by itself, with what was there when it was called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor, nn

from ndtp.split.tensor import SplitTensor, leave

KEYS = ("weight", "bias")
_wants, _version = attrgetter("requires_grad"), attrgetter("_version")
_place: Any = Tensor.data_ptr
# Which parameters there are; what changes when somebody writes to them, freezes or thaws them; and they themselves, so
# that nothing else is made where they lay.  Two states are alike where the first three of these are.
WeightsThen = tuple[tuple[int, ...], list[int], bytes, list[Any]]


class SeenWeights:
    """The weights and biases of some layers.

    Args:
        layers: in any order.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self._places: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._known: list[Any] = []
        self._ids: tuple[int, ...] = ()
        self._real: list[Tensor] = []
        self._counted: list[Tensor] = []
        self._shards: list[Tensor] = []

    def now(self) -> WeightsThen:
        """Return the parameters as they are, by functions in C alone, since this is done at each call of a layer."""
        if len(self._keys) != len(KEYS) * len(self.layers):
            self._places = [layer._parameters for layer in self.layers for _ in KEYS]
            self._keys = [*KEYS] * len(self.layers)
        found = [*map(dict.get, self._places, self._keys)]
        if not self._ids or any(map(is_not, found, self._known)):
            self._look_at(found)
        try:
            written = [*map(_version, self._counted), *map(_place, self._shards)]
        except RuntimeError:  # tensors of inference, or without memory
            written = []
        return self._ids, written, bytes(map(_wants, self._real)), self._known

    def _look_at(self, found: list[Any]) -> None:
        self._known, self._ids, self._real = found, tuple(map(id, found)), [bare(p) for p in found if p is not None]
        self._shards = [getattr(p, "_local_tensor", p) for p in self._real]
        # An operation on a DTensor counts on the DTensor alone, one on its local tensor there alone.
        inner = [getattr(p, "_dtensor", None) for p in self._real]
        self._counted = [x for x in (*self._real, *inner, *self._shards) if x is not None]


def bare(p: Tensor) -> Tensor:
    """Return the shard of a split tensor that was computed and put in a parameter's place; anything else as it is."""
    return leave(p) if isinstance(p, SplitTensor) else p


@contextmanager
def with_weights(weights: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put weights in the places of a layer's own ones: those of the call, as in `torch.func.functional_call`.

    Args:
        weights: layers, the names of their parameters, and what is to be there.
    """
    own = [(layer._parameters, key, layer._parameters[key]) for layer, key, _ in weights]
    try:
        for layer, key, p in weights:
            layer._parameters[key] = p
        yield
    finally:
        for parameters, key, p in own:
            parameters[key] = p


@contextmanager
def as_frozen(then: WeightsThen) -> Iterator[None]:
    """Let parameters want gradients as they did when a layer was called."""
    real = (p for p in then[3] if p is not None)
    others = [
        (p, bool(wants)) for p, wants in zip(real, then[2], strict=True) if p.is_leaf and p.requires_grad != wants
    ]
    try:
        for p, wants in others:
            p.requires_grad_(wants)
        yield
    finally:
        for p, wants in others:
            p.requires_grad_(not wants)
