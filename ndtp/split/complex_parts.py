"""Views of complex numbers as pairs of real ones, and back: rotary embeddings that turn pairs of features."""

from __future__ import annotations

from typing import Any

import torch

from ndtp.compute.torch_calls import TorchFunction
from ndtp.split.copies import as_view, standing_for, with_strides_of
from ndtp.split.tensor import SplitTensor, enter, getters, leave, like, rule
from ndtp.split.views import with_dims_at, without


@rule(torch.view_as_complex, torch.view_as_real, torch.real, torch.imag, *getters("real", "imag"))
def complex_view(func: TorchFunction, x: Any) -> object:
    """A view whose dims are those of the tensor, but for the one of pairs, which is whole."""
    if not isinstance(x, SplitTensor):
        return NotImplemented
    dense = func(like(x))
    last = len(x.spec.sizes) - 1
    is_pairs = func is torch.view_as_complex
    if x.spec.dims[last:] not in ((), ((),)) and (is_pairs or x.spec.sections):
        x = standing_for(x, without(x, [last]))
    where: list[int | None] = list(range(len(x.spec.sizes)))
    if is_pairs:
        where[last] = None
        if not leave(x).is_contiguous():
            x = standing_for(x, enter(leave(x).contiguous(), x.spec))
    shard = func(leave(x))
    made = enter(shard.view_as(shard), with_dims_at(x.spec, dense.shape, where))
    return as_view(with_strides_of(made, dense), x)
