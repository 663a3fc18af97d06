"""Sums of what ranks send each other: low precision in fp32, in the order of the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ndtp import dtypes

LOW_PRECISION = tuple(getattr(torch, name) for name in dtypes.LOW_PRECISION)


def summed_up(blocks: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over dim 0, low precision in fp32, in the order of the ranks."""
    if blocks.dtype in LOW_PRECISION:
        summed = blocks.sum(0, dtype=torch.float32)
        return summed.to(blocks.dtype) if out is None else out.copy_(summed)
    return torch.sum(blocks, 0, dtype=blocks.dtype, out=out)


@dataclass(frozen=True)
class Sum:
    """Blocks that have arrived and are to be added up, by whoever calls it, or in one pass with what follows.

    Attributes:
        blocks: [ranks, ..].
        out: where the sum is wanted.
    """

    blocks: Tensor
    out: Tensor | None = None

    def __call__(self) -> Tensor:
        return summed_up(self.blocks, self.out)
