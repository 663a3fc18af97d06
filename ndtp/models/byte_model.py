"""A byte-level transformer, dense or on a grid: what `ndtp demo` trains, and `ndtp train` by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.volume import Volume
from ndtp.compute.rotary import Rotary
from ndtp.models.compared_calls import compare_calls
from ndtp.nn.attention import Attention
from ndtp.nn.attention_dense import DenseAttention
from ndtp.nn.embedding import Embedding
from ndtp.nn.linear import Linear
from ndtp.nn.losses import LinearCrossEntropy, linear_cross_entropy
from ndtp.nn.mlp import MLP
from ndtp.nn.norms import LayerNorm
from ndtp.ops.products import relayout
from ndtp.runtime.process_grid import ProcessGrid

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class ByteModelSizes:
    width: int = 64
    inner: int = 256
    layers: int = 2
    heads: int = 8


class DenseMLP(nn.Module):
    """`down(gelu(up(x)))`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """One layer, y + mlp(norm(y)) with y = x + attention(norm(x)), on rows [tokens, width] or this rank's shard of
    them.
    """

    def __init__(self, sizes: ByteModelSizes) -> None:
        super().__init__()
        self.attention_norm: Any = nn.LayerNorm(sizes.width)
        self.attention: Any = DenseAttention(sizes.width, sizes.heads, positions=Rotary())
        self.mlp_norm: Any = nn.LayerNorm(sizes.width)
        self.mlp: Any = DenseMLP(sizes.width, sizes.inner)

    def forward(self, x: Tensor, length: int) -> Tensor:
        rows = self.attention_norm(x)
        if isinstance(self.attention, Attention):
            x = x + self.attention(rows, length=length)
        else:
            x = x + self.attention(rows.unflatten(0, (-1, length))).flatten(0, 1)
        return x + self.mlp(self.mlp_norm(x))


class ByteModel(nn.Module):
    """Predicts the next byte.

    Dense as it is made; `to_grid` puts every layer of it on a grid, in place, where hidden states stay split from the
    embedding to the loss.  Keys and shapes of the state dict stay the same.
    """

    def __init__(self, sizes: ByteModelSizes) -> None:
        super().__init__()
        self.mesh: ProcessGrid | None = None
        self.embedding: Any = nn.Embedding(VOCABULARY, sizes.width)
        self.layers: Any = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm: Any = nn.LayerNorm(sizes.width)
        self.head: Any = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def to_grid(self, mesh: ProcessGrid, scheme: str, chunks: int | str = "auto") -> ByteModel:
        """Raises LayoutError: sizes that the grid does not divide, with those that it would."""
        on: dict[str, Any] = {"mesh": mesh, "scheme": scheme}
        self.mesh = mesh
        self.embedding = Embedding.from_dense(self.embedding, **on)
        for layer in self.layers:
            layer.attention_norm = LayerNorm.from_dense(layer.attention_norm, **on)
            layer.attention = Attention.from_dense(layer.attention, chunks=chunks, **on)
            layer.mlp_norm = LayerNorm.from_dense(layer.mlp_norm, **on)
            layer.mlp = MLP.from_dense(layer.mlp.up, layer.mlp.down, "gelu", chunks=chunks, **on)
        self.norm = LayerNorm.from_dense(self.norm, **on)
        self.head = Linear.from_dense(self.head, pad=True, **on)
        compare_calls(self, mesh, scheme=scheme)
        return self

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of all bytes, on every rank.

        ids, targets    [batch, length]  whole, on every rank
        """
        h = self.hidden(ids)
        if self.mesh is None:
            return F.cross_entropy(self.head(h), targets.flatten())
        return linear_cross_entropy(h, self.head, targets.flatten())

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states before the head: of all rows, or this rank's shard of them."""
        rows = ids.flatten()
        h = self.embedding(rows if self.mesh is None else self.embedding.in_layout.shard(rows, self.mesh.rank))
        for layer in self.layers:
            h = layer(h, ids.shape[1])
        return self.norm(h)

    def logits(self, ids: Tensor) -> Tensor:
        """Return logits of the next byte, [batch, length, 256], whole on every rank."""
        rows = self.head(self.hidden(ids))
        if self.mesh is not None:
            rows = relayout(rows, self.head.out_layout, Layout(self.mesh.grid, None, None), self.mesh, "logits")
        return rows[: ids.numel(), :VOCABULARY].unflatten(0, ids.shape)

    def volume(self, batch: int, length: int) -> Volume:
        """The exact traffic of a forward and backward on the grid, in elements of fp32 received per rank.

        Args:
            batch: sequences, those of all ranks.
        """
        tokens = batch * length
        total = self.embedding.volume(tokens) + self.norm.volume(tokens)
        for layer in self.layers:
            total += layer.attention_norm.volume(tokens) + layer.attention.volume(batch, length)
            total += layer.mlp_norm.volume(tokens) + layer.mlp.volume(tokens)
        return total + LinearCrossEntropy(self.head).volume(tokens)
