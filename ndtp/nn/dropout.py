"""Dropout whose mask is that of the whole tensor, cut to this rank's shard."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.nn.padding import RowBlocks
from ndtp.nn.random import draw_seed, key_of, uniform_at
from ndtp.runtime.process_grid import ProcessGrid

UNPADDED = RowBlocks()


def drop(x: Tensor, p: float, layout: Layout, mesh: ProcessGrid, features: int | None, blocks: RowBlocks) -> Tensor:
    """This rank's shard of the dropout of the whole tensor, with a mask drawn anew; see `Dropout`."""
    rows = x.flatten(0, -2)
    shape = [size * layout.num_splits(dim) for dim, size in enumerate(rows.shape)]
    key = key_of(draw_seed(), "dropout")
    row, column = (torch.arange(part.start, part.stop, device=x.device) for part in layout.slices(mesh.rank, shape))
    row = row // blocks.padded * blocks.real + row % blocks.padded
    kept = uniform_at((shape[0], features or shape[1]), (row, column), key) >= p
    return x * (kept.view(x.shape).to(x.dtype) / (1.0 - p or 1.0))


class Dropout(nn.Module):
    """Dropout on a sharded tensor: the same mask on every grid, a grid of one rank included.

    The mask is keyed by a seed from torch's default generator and by the global index, so it is the same wherever
    `torch.manual_seed` was, and activation checkpointing recomputes it.  It is not the mask that `nn.Dropout` would
    draw.  Every rank of the grid must have seeded torch alike.

    Args:
        p: the probability of an element to become zero.
        layout: how the tensor [rows, features] lies; further leading dims of the shard count as rows.
        features: how many of the features are no padding, which has no part in the mask; default: all.
    """

    def __init__(self, p: float, layout: Layout, mesh: ProcessGrid, features: int | None = None) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"Dropout: p={p} is not in [0, 1)")
        self.p, self.layout, self.mesh, self.features = p, layout, mesh, features

    def forward(self, x: Tensor, *, blocks: RowBlocks = UNPADDED) -> Tensor:
        """
        Args:
            blocks: which rows of the whole tensor are padding, which has no part in the mask.
        """
        if not self.training or self.p == 0.0:
            return x
        return drop(x, self.p, self.layout, self.mesh, self.features, blocks)

    def extra_repr(self) -> str:
        return f"p={self.p}, {self.layout.label('MN')}"
