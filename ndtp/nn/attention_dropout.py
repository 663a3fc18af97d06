"""Dropout of attention weights, with a mask that the grid has no part in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ndtp.nn.random import draw_key, uniform_at


@dataclass(frozen=True)
class AttentionDropout:
    """One draw: weights are kept by their sequence, query, head and key in the whole, keyed as `ndtp.nn.Dropout`.

    Args:
        p: the probability of a weight to become zero.
        key: of the draw.
    """

    p: float
    key: int | Tensor

    @classmethod
    def of(cls, p: float, device: torch.device) -> AttentionDropout | None:
        """Drawn anew from torch's generator; None for nothing to drop."""
        return cls(p, draw_key("attention dropout", device)) if p else None

    def __call__(
        self, weights: Tensor, sequences: Tensor, begin: int, head: int, whole: tuple[int, int, int]
    ) -> Tensor:
        """Drop attention weights by the mask of the whole tensor.

        Args:
            weights: [sequences, heads, queries, keys].
            sequences: the indices, in the whole tensor, of these sequences.
            begin: the index of the first query.
            head: the index of the first head.
            whole: the numbers of sequences, queries and heads in the whole tensor.
        """
        device, (_, heads, queries, keys) = weights.device, weights.shape
        row = sequences[:, None] * whole[1] + torch.arange(begin, begin + queries, device=device)
        columns = torch.arange(head * keys, (head + heads) * keys, device=device)
        drawn = uniform_at((whole[0] * whole[1], whole[2] * keys), (row.flatten(), columns), self.key)
        kept = (drawn >= self.p).unflatten(0, row.shape).unflatten(2, (heads, keys)).transpose(1, 2)
        return weights * (kept.to(weights.dtype) / (1.0 - self.p or 1.0))
