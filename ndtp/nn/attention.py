"""`Attention`: multi-head, grouped-query and multi-query attention on a grid of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.attention_plan import AttentionPlan
from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.schemes import BlockLayouts, block_layouts
from ndtp.algebra.volume import Volume
from ndtp.compute.attention import Sees, attend
from ndtp.errors import LayoutError
from ndtp.nn.attention_dense import (
    PROJECTIONS,
    DenseAttention,
    KVCache,
    Positions,
    dim_of_head,
    dropped_at,
    norm_options,
    positions_of,
    whole_mask,
)
from ndtp.nn.fused_keys import fused_keys
from ndtp.nn.hooks import runs_alone
from ndtp.nn.linear import Linear
from ndtp.nn.norms import LayerNorm, RMSNorm
from ndtp.nn.padding import as_rows, with_leading_dims
from ndtp.nn.random import given_or_drawn
from ndtp.nn.sharded import BlockModule, memory_of, volume_of
from ndtp.ops.memory import Memory
from ndtp.ops.products import chain
from ndtp.ops.reductions import reduce
from ndtp.runtime.arrival import local_shard
from ndtp.runtime.given_mesh import GivenWire, given_mesh
from ndtp.runtime.process_grid import ProcessGrid


class Attention(BlockModule):
    """Self-attention of hidden states that lie on a grid, back to where they began.

        x        [tokens, hidden]  as `in_layout`       returns the same as `out_layout`
        q_proj   weight [heads d, hidden]               k_proj, v_proj   [kv_heads d, hidden]
        o_proj   weight [hidden, heads d]

    Queries, keys and values are one product, so that x is gathered once: the first of a block, whose N are the heads.
    The core works on the heads and sequences that a rank has, with torch's `scaled_dot_product_attention`.  Where a
    rank has a part of a key head, as there are fewer of them than ranks, they are gathered over the ranks that share
    it; where it has a part of a sequence, the keys and values of that sequence are.  `o_proj` is the second product.

    Args:
        hidden: features of a token.
        heads, kv_heads: of the queries, and of keys and values; default: as many.
        head_dim: features of a head; default: hidden / heads.
        bias, out_bias: of the first three products, and of the last one; default of that: as the first.
        device, dtype: as for `nn.Linear`.
        mesh: the process grid.
        scheme: "1d", "1d-sp", "2d", "2d-features" or "3d", see `ndtp.algebra.schemes.block_layouts`.
        axes: the axes that the scheme uses.
        layouts: explicit layouts instead of a scheme.
        positions: called with queries, and with keys, [rows, heads, d], and the positions of their rows, and returns
            what it makes of them: `ndtp.nn.Rotary(...)`, or any function of your own that goes row by row.
        causal: whether a token sees those before it only.
        window: a token sees others that are nearer than that.
        qk_norm: "rms" or "layer": norms of queries and keys, a head at a time; with "-features" over all heads.
        eps: of these.
        scale: of the scores; default: 1 / sqrt(head_dim).
        dropout: probability for the weights; the mask is the same on every grid, see `ndtp.nn.Dropout`.
        fused, fused_order: the name of a layer that has queries, keys and values in one in the dense model: the state
            dict has its keys (writing it is a collective), with rows in the order "parts" or "groups" of
            `ndtp.nn.attention_dense.split_projections`.
        regather, chunks, wire: as for `ndtp.nn.Linear`.
        seed: default: drawn from torch's generator, which must be seeded alike on every rank.
        name: what errors, profiles and the initialisation call it.

    Raises:
        LayoutError: heads or sizes that do not divide, with those that would.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ProcessGrid,
        scheme: str = "3d",
        axes: Sequence[str] | None = None,
        layouts: BlockLayouts | None = None,
        positions: Positions | None = None,
        causal: bool = True,
        window: int | None = None,
        qk_norm: str | None = None,
        eps: float | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        fused: str | None = None,
        fused_order: str = "parts",
        regather: tuple[str, ...] = (),
        chunks: int | str = "auto",
        wire: GivenWire = None,
        seed: int | None = None,
        name: str = "attention",
    ) -> None:
        super().__init__()
        mesh = given_mesh(mesh, name, wire=wire)
        layouts = layouts or block_layouts(mesh.grid, scheme, axes)
        self.hidden, self.heads, self.kv_heads = hidden, heads, kv_heads or heads
        self.head_dim = dim_of_head(head_dim, hidden, heads, positions, name)
        self.mesh, self.layouts, self.name, self.seed = mesh, layouts, name, seed
        self.positions, self.sees, self.scale, self.qk_norm = positions, Sees(causal, window), scale, qk_norm
        self.dropout, self.fused = dropout, fused_keys(fused, fused_order, heads, self.kv_heads)
        if self.fused is not None:
            self.fused.watch(self)
        self.plan = AttentionPlan(layouts.hidden, heads, self.kv_heads, self.head_dim, name)
        shared: dict[str, Any] = {
            "device": device, "dtype": dtype, "mesh": mesh, "regather": regather, "chunks": chunks,
            "seed": given_or_drawn(seed),
        }  # fmt: skip
        ends = ("in_layout", "weight_layout", "out_layout")
        up: dict[str, Any] = dict(zip(ends, (layouts.input, layouts.up_weight, layouts.hidden), strict=True))
        down: dict[str, Any] = dict(zip(ends, (layouts.hidden, layouts.down_weight, layouts.output), strict=True))
        wide, narrow = heads * self.head_dim, self.kv_heads * self.head_dim
        for projection, features in zip(PROJECTIONS, (wide, narrow, narrow), strict=False):
            self.add_module(projection, Linear(hidden, features, bias, name=f"{name}.{projection}", **up, **shared))
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = Linear(wide, hidden, out_bias, name=f"{name}.o_proj", **down, **shared)
        self._add_norms(norm_options(qk_norm, name), wide, narrow, 1e-6 if eps is None else eps, device, dtype)
        # Process groups of their own are made now, by all ranks together.
        self.head_mesh = mesh.refine(**dict(self.plan.head_cut.refinement))

    def _add_norms(
        self,
        norm: tuple[type[nn.Module], bool] | None,
        wide: int,
        narrow: int,
        eps: float,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        if norm is None:
            return
        dense, over_all = norm
        kind: Any = LayerNorm if dense is nn.LayerNorm else RMSNorm
        rows, heads = self.layouts.hidden.dims
        layout = self.layouts.hidden if over_all else Layout(self.mesh.grid, (*rows, *heads), None)
        for name, features in (("q_norm", wide), ("k_norm", narrow)):
            features = features if over_all else self.head_dim
            options = {"mesh": self.mesh, "layout": layout, "name": f"{self.name}.{name}"}
            self.add_module(name, kind(features, eps, device=device, dtype=dtype, **options))

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    q_norm: LayerNorm | RMSNorm
    k_norm: LayerNorm | RMSNorm

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all parameters anew; the same values on every grid."""
        seed = given_or_drawn(seed, self.seed)
        for module in self.children():
            module.reset_parameters(seed)  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,
        length: int | None = None,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The attention of whole sequences, of which this rank has some rows.

        Args:
            x: this rank's shard, [rows, hidden]; or [sequences, length, hidden], where it has whole ones.
            length: of the sequences in x.
            position_ids: [batch or 1, length], of all sequences; default: 0, 1, .., behind those in the cache.
            mask: of all sequences: [batch, keys], True where a token is none of padding; or [batch or 1, heads or 1,
                length or 1, keys], of booleans (True sees) or added to the scores.  On top of `causal` and `window`.
            cache: keys and values of the tokens before, to which those of x are added.

        Raises:
            LayoutError: a length that is not given, or sequences that do not divide, with the batches that would.
        """
        if length is None and x.dim() != 3:
            raise LayoutError(
                f"Attention '{self.name}': x is {tuple(x.shape)}, rows of sequences whose length it does not tell\n"
                "  fix: give length="
            )
        length = int(x.shape[1]) if length is None else length
        rows = as_rows(x, self.name)
        tokens = rows.shape[0] * self.in_layout.num_splits(0)
        if length < 1 or tokens % length:
            raise LayoutError(f"Attention '{self.name}': {tokens} tokens are not whole sequences of {length}")
        batch = tokens // length
        self.plan.rows(batch, length)
        q, k, v = self._queries_keys_values(rows)
        y = self._core(q, k, v, batch, length, position_ids, mask, cache)
        y = self.o_proj(y)
        return with_leading_dims(y, x.shape[:-1], self.name)

    def _queries_keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [rows, features], as `layouts.hidden`.

        They are one product, unless hooks or changed parts make it matter that the parts are called.
        """
        parts = (self.q_proj, self.k_proj, self.v_proj)
        operands = [part.operands(rows) for part in parts]
        if not all(runs_alone(part, Linear) for part in parts) or len({w.dtype for w, _ in operands}) > 1:
            q, k, v = (part(rows) for part in parts)
            return q, k, v
        weight, bias = (
            None if any(p is None for p in each) else self._in_turns([local_shard(p) for p in each])
            for each in zip(*operands, strict=True)
        )
        assert weight is not None
        y = chain(rows, (weight,), (bias,), (self.q_proj.plan,), (None,), self.mesh)
        q, k, v = y.split([part.out_features // self.layouts.hidden.num_splits(1) for part in parts], 1)
        return q, k, v

    def _in_turns(self, shards: list[Tensor]) -> Tensor:
        """Rows of the three weights as one.

        Where the result is split further than the weight, each of its parts has some of all three.
        """
        parts = self.layouts.hidden.num_splits(1) // self.layouts.up_weight.num_splits(0)
        if parts == 1:
            return torch.cat(shards)
        return torch.cat([shard.unflatten(0, (parts, -1)) for shard in shards], 1).flatten(0, 1)

    def _core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: int,
        length: int,
        position_ids: Tensor | None,
        mask: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        """Compute attention from queries, keys and values [rows, features] to the input [rows, features] of o_proj."""
        plan, rank, d = self.plan, self.mesh.rank, self.head_dim
        norm = norm_options(self.qk_norm, self.name)
        if norm is not None and norm[1]:
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = _gathered(k, v, plan.head_gather, self.head_mesh)
        q, k, v = (t.unflatten(1, (-1, d)) for t in (q, k, v))
        if norm is not None and not norm[1]:
            q, k = self.q_norm(q), self.k_norm(k)
        past = 0 if cache is None else cache.length
        first = plan.first_row(rank, batch, length)
        if self.positions is not None:
            at = positions_of(position_ids, batch, length, past, q.device)[first : first + q.shape[0]]
            q, k = self.positions(q, at), self.positions(k, at)
        sequence, count = plan.sequences(rank, batch)
        row_mesh = self.mesh.refine(**dict(plan.row_cut(batch).refinement))
        k, v = _gathered(k.flatten(1), v.flatten(1), plan.row_gather(batch), row_mesh)
        k, v = (t.unflatten(1, (-1, d)).unflatten(0, (count, length)) for t in (k, v))
        if cache is not None:
            k, v = cache.append(k, v)
        mask = whole_mask(mask, batch, self.heads, length, k.shape[1], self.name)
        if mask is not None:
            mask = mask[sequence : sequence + count] if mask.shape[0] > 1 else mask
            head = plan.first_head(rank)
            mask = mask[:, head : head + plan.local_heads] if mask.shape[1] > 1 else mask
        begin = first - sequence * length
        rate, whole = self.dropout if self.training else 0.0, (batch, length, self.heads)
        drop = dropped_at(rate, sequence, plan.first_head(rank), whole, q.device)
        return attend(
            q, k, v, plan.kv_of(rank), begin, length, self.sees, self.scale, mask, drop, is_split=True
        ).flatten(1)

    def _norms(self) -> list[LayerNorm | RMSNorm]:
        return [] if self.qk_norm is None else [self.q_norm, self.k_norm]

    def volume(self, batch: int, length: int, dgrad: bool = True) -> Volume:
        """The exact traffic of a forward and backward of so many sequences, in bytes received per rank.

        Args:
            dgrad: whether x needs a gradient.
        """
        shape = self.in_layout.shard_shape((batch * length, self.hidden))
        x = torch.empty(shape, dtype=self.q_proj.weight.dtype, device="meta", requires_grad=dgrad)
        return volume_of(_OfLength(self, length, moves_alone=True), self.mesh, (x,))

    def memory(self, batch: int, length: int, dgrad: bool = True, backend: str | None = None) -> Memory:
        """Bytes that a forward and backward need beside input and parameters; see `ndtp.ops.memory`.

        Those of torch's own kernels are what they are on tensors without memory.
        """
        shape = self.in_layout.shard_shape((batch * length, self.hidden))
        x = torch.empty(shape, dtype=self.q_proj.weight.dtype, device="meta", requires_grad=dgrad)
        run = _OfLength(self, length)
        out = self.out_layout.shard_shape((batch * length, self.hidden))
        return memory_of(run, self.mesh, (x,), out, backend)

    def load_dense(self, dense: nn.Module) -> Attention:
        """Take over the values of a module with the same parameters, such as a `DenseAttention`."""
        for name in PROJECTIONS:
            getattr(self, name).load_dense(getattr(dense, name))
        for name, norm in zip(("q_norm", "k_norm"), self._norms(), strict=False):
            norm._load_dense(getattr(dense, name))
        return self

    @classmethod
    def from_dense(cls, dense: DenseAttention, *, mesh: ProcessGrid, **arguments: Any) -> Attention:
        """Make an attention with the weights of a `DenseAttention`; further arguments are the constructor's."""
        like = dense.q_proj
        arguments = {"device": like.weight.device, "dtype": like.weight.dtype, "seed": 0, **arguments}
        eps: Any = None if dense.qk_norm is None else dense.q_norm.eps
        module = cls(
            dense.hidden, dense.heads, dense.kv_heads, dense.head_dim, like.bias is not None,
            dense.o_proj.bias is not None, mesh=mesh, positions=dense.positions, causal=dense.sees.causal,
            window=dense.sees.window, qk_norm=dense.qk_norm, eps=eps, scale=dense.scale, dropout=dense.dropout,
            **{**_fused_of(dense), **arguments},
        )  # fmt: skip
        return module.load_dense(dense).train(dense.training)

    def to_dense(self) -> DenseAttention:
        """A `DenseAttention` with the same values, on every rank; a collective."""
        norms = self._norms()
        dense = DenseAttention(
            self.hidden, self.heads, self.kv_heads, self.head_dim, self.q_proj.bias is not None,
            self.o_proj.bias is not None, device="meta", positions=self.positions, causal=self.sees.causal,
            window=self.sees.window, qk_norm=self.qk_norm, eps=norms[0].eps if norms else None, scale=self.scale,
            dropout=self.dropout, **_fused_of(self),
        )  # fmt: skip
        for name in PROJECTIONS:
            setattr(dense, name, getattr(self, name).to_dense())
        for name, norm in zip(("q_norm", "k_norm"), norms, strict=False):
            setattr(dense, name, norm.to_dense())
        return dense.train(self.training)

    def extra_repr(self) -> str:
        shared = f", kv_heads={self.kv_heads}" * (self.kv_heads != self.heads)
        return f"{self.hidden}, heads={self.heads}{shared}, [{self.in_layout.label('MK')}]"


def _fused_of(attention: Attention | DenseAttention) -> dict[str, Any]:
    fused = attention.fused
    return {} if fused is None else {"fused": fused.name, "fused_order": fused.order}


def _gathered(k: Tensor, v: Tensor, plan: RelayoutPlan, mesh: ProcessGrid) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, features], by one collective for both."""
    if plan.is_identity:
        return k, v
    both = reduce(torch.stack((k, v)), plan, mesh)
    return both[0], both[1]


class _OfLength(nn.Module):
    """An attention of sequences of one length.

    Args:
        moves_alone: positions, by which nothing moves, are left out: they may be a function that needs numbers.
    """

    def __init__(self, attention: Attention, length: int, moves_alone: bool = False) -> None:
        super().__init__()
        self.attention, self.length, self.moves_alone = attention, length, moves_alone

    def forward(self, x: Tensor) -> Tensor:
        if self.moves_alone:  # of a copy
            self.attention.positions = None
        return self.attention(x, self.length)
