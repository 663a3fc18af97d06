"""Dropout whose mask is that of the whole tensor, cut to this rank's shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.volume import Volume
from ndtp.nn.padding import RowBlocks
from ndtp.nn.random import draw_key, uniform_at
from ndtp.nn.sharded import memory_of
from ndtp.ops.memory import Memory
from ndtp.runtime.process_grid import ProcessGrid

UNPADDED = RowBlocks()


def drop(x: Tensor, p: float, layout: Layout, mesh: ProcessGrid, features: int | None, blocks: RowBlocks) -> Tensor:
    """This rank's shard of the dropout of the whole tensor, with a mask drawn anew; see `Dropout`."""
    rows = x.flatten(0, x.dim() - layout.ndim) if x.dim() > layout.ndim else x
    shape = [size * layout.num_splits(dim) for dim, size in enumerate(rows.shape)]
    key = draw_key("dropout", x.device)
    row, *others = (torch.arange(part.start, part.stop, device=x.device) for part in layout.slices(mesh.rank, shape))
    kept = uniform_at((*shape[:-1], features or shape[-1]), (blocks.dense_row(row), *others), key) >= p
    return x * (kept.view(x.shape).to(x.dtype) / (1.0 - p or 1.0))


class Dropout(nn.Module):
    """Dropout on a sharded tensor: the same mask on every grid, a grid of one rank included.

    The mask is keyed by a seed from torch's default generator and by the global index, so it is the same wherever
    `torch.manual_seed` was, and activation checkpointing recomputes it.  It is not the mask that `nn.Dropout` would
    draw.  Every rank of the grid must have seeded torch alike.

    Args:
        p: the probability of an element to become zero.
        layout: how the tensor lies, [rows, features] or of more dims; further leading dims of the shard count as rows.
        features: how many of the features are no padding, which has no part in the mask; default: all.
    """

    def __init__(self, p: float, layout: Layout, mesh: ProcessGrid, features: int | None = None) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"Dropout: p={p} is not in [0, 1)")
        self.p, self.layout, self.mesh, self.features = p, layout, mesh, features

    def forward(self, x: Tensor, *, blocks: RowBlocks = UNPADDED) -> Tensor:
        """Drop elements of a shard by the mask of the whole tensor.

        Args:
            blocks: the rows of the whole tensor that are padding, which has no part in the mask.
        """
        if not self.training or self.p == 0.0:
            return x
        return drop(x, self.p, self.layout, self.mesh, self.features, blocks)

    @property
    def in_layout(self) -> Layout:
        return self.layout

    out_layout = in_layout

    def volume(self, tokens: int) -> Volume:
        """Nothing moves: every rank draws its part of one mask."""
        return Volume()

    def memory(
        self, shape: Sequence[int], dgrad: bool = True, dtype: torch.dtype = torch.float32, backend: str | None = None
    ) -> Memory:
        """Bytes that a forward and backward of a tensor of the global `shape` need beside it; see `ndtp.ops.memory`."""
        local = self.layout.shard_shape(shape)
        x = torch.empty(local, dtype=dtype, device="meta", requires_grad=dgrad)
        return memory_of(self, self.mesh, (x,), local, backend)

    @classmethod
    def from_dense(
        cls, dense: nn.Dropout, *, layout: Layout, mesh: ProcessGrid, features: int | None = None
    ) -> Dropout:
        """Make the dropout of an `nn.Dropout` on a grid."""
        return cls(dense.p, layout, mesh, features).train(dense.training)

    def to_dense(self) -> nn.Dropout:
        return nn.Dropout(self.p).train(self.training)

    def extra_repr(self) -> str:
        letters = "MN" if self.layout.ndim == 2 else "ABCDEFGH"[: self.layout.ndim]
        return f"p={self.p}, {self.layout.label(letters)}"
