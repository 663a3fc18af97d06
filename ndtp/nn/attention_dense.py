"""`DenseAttention`: what `ndtp.nn.Attention` is the parallel of, and the cache of keys and values that both take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.compute.attention import Drop, Sees, attend
from ndtp.compute.rotary import Rotary
from ndtp.errors import LayoutError
from ndtp.nn.fused_keys import ORDERS, FusedKeys, fused_keys
from ndtp.nn.random import draw_key, uniform_at

Positions = Callable[[Tensor, Tensor], Tensor]  # of x [rows, heads, d] at positions [rows]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class KVCache:
    """Keys and values of the tokens so far, of one attention layer: of this rank's sequences and heads, on a grid.

    Attributes:
        length: of the sequences so far.
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.k is None else self.k.shape[1]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put those of new tokens [sequences, length, heads, d] behind; all that there are now."""
        if self.k is not None and self.v is not None:
            if self.k.shape[0] != k.shape[0]:
                raise LayoutError(
                    f"KVCache: it has {self.k.shape[0]} sequences, the new tokens are of {k.shape[0]}\n"
                    "  fix: a cache for every batch"
                )
            k, v = torch.cat((self.k, k), 1), torch.cat((self.v, v), 1)
        self.k, self.v = k, v
        return k, v


def norm_options(kind: str | None, name: str) -> tuple[type[nn.Module], bool] | None:
    """Return the dense class of the norms of queries and keys, and whether they span all features of all heads.

    Raises:
        ValueError: an unknown kind.
    """
    if kind is None:
        return None
    kinds: dict[str, type[nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
    base, _, span = kind.partition("-")
    if base not in kinds or span not in ("", "features"):
        raise ValueError(
            f"Attention '{name}': qk_norm={kind!r} is not one of rms, layer (a head at a time), rms-features, "
            "layer-features"
        )
    return kinds[base], span == "features"


def dim_of_head(head_dim: int | None, hidden: int, heads: int, positions: Positions | None, name: str) -> int:
    """Return the features of a head.

    Raises:
        LayoutError: none are given and the heads do not share the hidden ones, or the positions cannot turn them.
    """
    if head_dim is None and hidden % heads:
        raise LayoutError(f"Attention '{name}': {heads} does not divide {hidden} features\n  fix: give head_dim")
    head_dim = head_dim or hidden // heads
    if isinstance(positions, Rotary):
        positions.check(head_dim)
    return head_dim


class DenseAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention on one rank; see `ndtp.nn.Attention` for the arguments.

    Args:
        hidden, heads, kv_heads, head_dim, bias, out_bias, positions, causal, window, qk_norm, eps, scale, dropout,
            fused, fused_order: as there.
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
        positions: Positions | None = None,
        causal: bool = True,
        window: int | None = None,
        qk_norm: str | None = None,
        eps: float | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        fused: str | None = None,
        fused_order: str = "parts",
    ) -> None:
        super().__init__()
        self.dropout, self.fused = dropout, fused_keys(fused, fused_order, heads, kv_heads or heads)
        if self.fused is not None:
            self.fused.watch(self)
        self.hidden, self.heads, self.kv_heads = hidden, heads, kv_heads or heads
        self.head_dim = dim_of_head(head_dim, hidden, heads, positions, "dense")
        self.positions, self.sees, self.scale, self.qk_norm = positions, Sees(causal, window), scale, qk_norm
        out_bias = bias if out_bias is None else out_bias
        q, kv = heads * self.head_dim, self.kv_heads * self.head_dim
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj = nn.Linear(hidden, q, bias, **like), nn.Linear(hidden, kv, bias, **like)
        self.v_proj, self.o_proj = nn.Linear(hidden, kv, bias, **like), nn.Linear(q, hidden, out_bias, **like)
        norm = norm_options(qk_norm, "dense")
        if norm is not None:
            kind, over_all = norm
            eps = 1e-6 if eps is None else eps
            self.q_norm = kind(q if over_all else self.head_dim, eps=eps, **like)
            self.k_norm = kind(kv if over_all else self.head_dim, eps=eps, **like)

    @classmethod
    def of(
        cls, q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear, heads: int, kv_heads: int, **options: Any
    ) -> DenseAttention:
        """An attention of these layers, which it shares; options as for the constructor.

        Raises:
            LayoutError: layers that do not fit the heads.
        """
        dim, bias = q.out_features // heads, q.bias is not None
        sizes = [(layer.in_features, layer.out_features) for layer in (q, k, v, out)]
        wide, narrow, hidden = heads * dim, kv_heads * dim, q.in_features
        if sizes != [(hidden, wide), (hidden, narrow), (hidden, narrow), (wide, out.out_features)]:
            raise LayoutError(
                f"DenseAttention.of: layers {', '.join(f'{i} -> {o}' for i, o in sizes)} are not those of {heads} "
                f"heads and {kv_heads} of keys and values"
            )
        like: dict[str, Any] = {"device": "meta", **options}
        attention = cls(hidden, heads, kv_heads, dim, bias, out.bias is not None, **like)
        for name, layer in zip(PROJECTIONS, (q, k, v, out), strict=True):
            setattr(attention, name, layer)
        return attention

    @classmethod
    def of_multihead(cls, dense: nn.MultiheadAttention, causal: bool = False, **options: Any) -> DenseAttention:
        """The self-attention of an `nn.MultiheadAttention`; a copy of its values.

        Raises:
            LayoutError: one with other sizes of keys and values, or biases of these.
        """
        if dense.in_proj_weight is None or dense.bias_k is not None or dense.add_zero_attn:
            raise LayoutError(
                "DenseAttention.of_multihead: kdim, vdim, add_bias_kv and add_zero_attn are not there on a grid"
            )
        fused = nn.Linear(dense.embed_dim, 3 * dense.embed_dim, dense.in_proj_bias is not None, device="meta")
        fused.weight = dense.in_proj_weight
        if dense.in_proj_bias is not None:
            fused.bias = dense.in_proj_bias
        parts = split_projections(fused, dense.num_heads, dense.num_heads)
        options = {"causal": causal, "dropout": dense.dropout, **options}
        return cls.of(*parts, dense.out_proj, dense.num_heads, dense.num_heads, **options).train(dense.training)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Compute attention of x [batch, length, hidden]."""
        batch, length = x.shape[:2]
        rows = x.flatten(0, 1)
        norm = norm_options(self.qk_norm, "dense")
        over_all = norm is not None and norm[1]
        q, k, v = self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)
        if norm is not None and over_all:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if norm is not None and not over_all:
            q, k = self.q_norm(q), self.k_norm(k)
        past = 0 if cache is None else cache.length
        if self.positions is not None:
            at = positions_of(position_ids, batch, length, past, x.device)
            q, k = self.positions(q, at), self.positions(k, at)
        k, v = (t.unflatten(0, (batch, length)) for t in (k, v))
        if cache is not None:
            k, v = cache.append(k, v)
        shared = self.heads // self.kv_heads
        kv_of = [head // shared for head in range(self.heads)]
        mask = whole_mask(mask, batch, self.heads, length, k.shape[1], "dense")
        drop = dropped_at(self.dropout if self.training else 0.0, 0, 0, (batch, length, self.heads), q.device)
        y = attend(q, k, v, kv_of, 0, length, self.sees, self.scale, mask, drop)
        return self.o_proj(y.flatten(1)).unflatten(0, (batch, length))


def dropped_at(p: float, sequence: int, head: int, whole: tuple[int, int, int], device: torch.device) -> Drop | None:
    """Return the dropout of attention weights, with a mask that the grid has no part in; None for nothing to drop.

    It is drawn anew from torch's generator.  Weights are kept by their sequence, query, head and key in the whole,
    keyed as `ndtp.nn.Dropout`.

    Args:
        p: the probability of a weight to become zero.
        sequence, head: the first ones of this rank in the whole.
        whole: the numbers of sequences, queries and heads in the whole.
    """
    if not p:
        return None
    key = draw_key("attention dropout", device)

    def drop(weights: Tensor, first: int, begin: int) -> Tensor:
        """Drop weights [sequences, heads, queries, keys] of queries from `begin` on, of sequences from `first` on."""
        device, (count, heads, queries, keys) = weights.device, weights.shape
        sequences = torch.arange(count, device=device) + sequence + first
        row = sequences[:, None] * whole[1] + torch.arange(begin, begin + queries, device=device)
        columns = torch.arange(head * keys, (head + heads) * keys, device=device)
        drawn = uniform_at((whole[0] * whole[1], whole[2] * keys), (row.flatten(), columns), key)
        kept = (drawn >= p).unflatten(0, row.shape).unflatten(2, (heads, keys)).transpose(1, 2)
        return weights * (kept.to(weights.dtype) / (1.0 - p or 1.0))

    return drop


def positions_of(given: Tensor | None, batch: int, length: int, past: int, device: torch.device) -> Tensor:
    """Return the positions of all rows, [batch * length]."""
    if given is None:
        return torch.arange(past, past + length, device=device).repeat(batch)
    return given.expand(batch, length).reshape(-1)


def whole_mask(mask: Tensor | None, batch: int, heads: int, length: int, keys: int, name: str) -> Tensor | None:
    """Return the mask as [batch or 1, heads or 1, length or 1, keys].

    Raises:
        LayoutError: another shape.
    """
    if mask is None:
        return None
    shape = tuple(mask.shape)
    if mask.dim() == 2:  # of keys: padding
        mask = mask[:, None, None]
        mask = mask if mask.is_floating_point() else mask.bool()
    fits = mask.dim() == 4 and all(
        size in (1, whole) for size, whole in zip(mask.shape, (batch, heads, length, keys), strict=True)
    )
    if not fits:
        raise LayoutError(
            f"Attention '{name}': a mask {shape}; for {batch} sequences, {heads} heads, {length} queries and {keys} "
            f"keys give ({batch}, {keys}), or four dims of these sizes or 1"
        )
    return mask.expand(-1, -1, -1, keys)


def split_projections(
    fused: nn.Linear, heads: int, kv_heads: int, order: str = "parts"
) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Queries, keys and values as three layers, of one that gives them all.

    Args:
        order: of the fused rows: "parts" has all queries, then all keys, then all values (GPT-2, Phi-3,
            `nn.MultiheadAttention`); "groups" has, for every key head, its heads of queries, the key and the value
            (GPT-NeoX, Falcon).

    Raises:
        LayoutError: features that make no such heads, or another order.
    """
    rows = fused.out_features
    if order not in ORDERS or heads % kv_heads or rows % (heads + 2 * kv_heads):
        raise LayoutError(
            f"split_projections: {rows} features in the order {order!r} are not those of {heads} heads and twice "
            f"{kv_heads} more\n  fix: order 'parts' or 'groups', and heads that divide"
        )
    keys = FusedKeys("", order, heads, kv_heads)
    parts = {name: keys.split(parameter.detach()) for name, parameter in fused.named_parameters()}
    layers = []
    for i, weight in enumerate(parts["weight"]):
        layer = nn.Linear(fused.in_features, len(weight), fused.bias is not None, device="meta")
        for name, parameter in fused.named_parameters():
            setattr(layer, name, nn.Parameter(parts[name][i].clone(), parameter.requires_grad))
        layers.append(layer)
    return layers[0], layers[1], layers[2]
