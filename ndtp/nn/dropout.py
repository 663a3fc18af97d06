"""Dropout whose mask is that of the whole tensor, cut to this rank's shard."""

from __future__ import annotations

from torch import Tensor, nn

from ndtp.layout import Layout
from ndtp.nn.random import draw_seed, key_of, uniform
from ndtp.process_grid import ProcessGrid


class Dropout(nn.Module):
    """Dropout on a sharded tensor: the same mask on every grid, a grid of one rank included.

    The mask is keyed by a seed from torch's default generator and by the global index, so it is the same wherever
    `torch.manual_seed` was, and activation checkpointing recomputes it.  It is not the mask that `nn.Dropout` would
    draw.  Every rank of the grid must have seeded torch alike.

    Args:
        p: the probability of an element to become zero.
        layout: how the tensor [rows, features] lies; further leading dims of the shard count as rows.
    """

    def __init__(self, p: float, layout: Layout, mesh: ProcessGrid) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"Dropout: p={p} is not in [0, 1)")
        self.p, self.layout, self.mesh = p, layout, mesh

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        rows = x.flatten(0, -2)
        shape = [size * self.layout.num_splits(dim) for dim, size in enumerate(rows.shape)]
        key = key_of(draw_seed(), "dropout")
        kept = uniform(shape, self.layout.slices(self.mesh.rank, shape), key, x.device) >= self.p
        return x * (kept.view(x.shape).to(x.dtype) / (1.0 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}, {self.layout.label('MN')}"
