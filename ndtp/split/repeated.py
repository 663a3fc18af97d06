"""Copies that have each head several times: whoever moves one can move what it repeats instead.

Attention code repeats few key heads for its many query heads.  Where keys are gathered afterwards, as in sequences that
are split over ranks, the few heads travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ndtp.split.copies import version_of
from ndtp.split.tensor import SplitTensor


@dataclass(frozen=True, eq=False)
class Repeats:
    """A tensor that has each entry of a dim once, of which a copy has each several times, until one is written to.

    Attributes:
        few: the tensor that has each entry once.
        dim: of both tensors.
        times: how often each entry stands in a row.
        versions: of `few` and of the tensor when it was made.
    """

    few: SplitTensor
    dim: int
    times: int
    versions: tuple[Any, Any]


def repeating(made: SplitTensor, x: SplitTensor) -> Any:
    """Note that `made`, a reshaped copy of x, has each entry of a dim several times, where x was expanded in front."""
    if x.strides is None or not isinstance(made, SplitTensor):
        return made
    sizes, count = x.spec.sizes, len(x.spec.sizes)
    for dim in range(1, count):
        merged = (*sizes[: dim - 1], sizes[dim - 1] * sizes[dim], *sizes[dim + 1 :])
        if x.strides[dim] == 0 and sizes[dim] > 1 and x.strides[dim - 1] != 0 and made.spec.sizes == merged:
            few = x.select(dim, 0)
            if isinstance(few, SplitTensor):
                made.repeats = Repeats(few, dim - 1, sizes[dim], (version_of(few), version_of(made)))
    return made


def once(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """Return what a tensor repeats along a dim, counted from the end, and how often; itself and 1 where it does not."""
    found: Repeats | None = x.repeats if isinstance(x, SplitTensor) else None
    if found is None or found.dim != x.dim() + dim:
        return x, 1
    if (version_of(found.few), version_of(x)) != found.versions:  # type: ignore[arg-type]
        return x, 1
    return found.few, found.times
