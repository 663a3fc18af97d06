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
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from ndtp.runtime.versions import version_of
from ndtp.split.tensor import SplitTensor, leave

KEYS, GONE = ("weight", "bias"), object()
_wants, _version = attrgetter("requires_grad"), attrgetter("_version")
_place: Any = Tensor.data_ptr
# Which parameters there are; what changes when somebody writes to them, freezes or thaws them; and they themselves, so
# that nothing else is made where they lay.  Two states are alike where the first three of these are.
WeightsThen = tuple[tuple[int, ...], list[Any], bytes, tuple[Any, ...]]


class SeenWeights:
    """The weights and biases of some layers.

    Args:
        layers: in any order.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers

    def now(self) -> WeightsThen:
        """Return the parameters as they are, by few functions of Python, since each call of a layer asks."""
        # An operation on a DTensor counts on the DTensor alone, one on its local tensor there alone, and one on `.data`
        # nowhere: that it was read is what can be known.
        each = [
            (p, d := vars(p).get("_dtensor", p), getattr(d, "_local_tensor", d), vars(p).get("ndtp_data_reads"))
            for layer in self.layers
            for key in KEYS
            if (p := layer._parameters.get(key)) is not None
        ]
        if not each:
            return (), [], b"", ()
        real, inner, shards, reads = zip(*each, strict=True)
        if SplitTensor in set(map(type, real)):
            inner = shards = tuple(map(bare, real))
        try:
            written = [*map(_version, inner), *map(_version, shards), *map(_place, shards), *reads]
            written += () if inner is shards else map(_version, real)
        except RuntimeError:  # tensors of inference, or without memory
            written = [*map(version_of, inner), *reads]
        return tuple(map(id, real)), written, bytes(map(_wants, real)), real


def has_own_weights(layers: Sequence[Any]) -> bool:
    """Return whether layers compute with their parameters: nothing else was put in the place of one, under its name."""
    return all(
        layer.lies.keys() <= layer._parameters.keys() and layer.lies.keys().isdisjoint(vars(layer)) for layer in layers
    )


def bare(p: Tensor) -> Tensor:
    """Return the shard of a split tensor that was computed and put in a parameter's place; anything else as it is."""
    return leave(p) if isinstance(p, SplitTensor) else p


@contextmanager
def with_weights(weights: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put weights in the places of a layer's own ones: those of the call, as in `torch.func.functional_call`.

    Args:
        weights: layers, the names of their parameters, and what is to be there.
    """
    own = [(layer._parameters, key, layer._parameters.get(key, GONE)) for layer, key, _ in weights]
    try:
        for layer, key, p in weights:
            layer._parameters[key] = p
        yield
    finally:
        for parameters, key, p in own:
            if p is GONE:
                del parameters[key]
            else:
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
