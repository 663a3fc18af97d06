"""`DenseAttention`: what `ndtp.nn.Attention` is the parallel of, and the cache of keys and values that both take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.compute.attention import Sees, attend
from ndtp.errors import LayoutError

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
    """What the norms of queries and keys are: the dense class, and whether they go over all features of all heads.

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


class DenseAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention on one rank; see `ndtp.nn.Attention` for the arguments.

    Args:
        hidden, heads, kv_heads, head_dim, bias, out_bias, positions, causal, window, qk_norm, eps, scale: as there.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        positions: Positions | None = None,
        causal: bool = True,
        window: int | None = None,
        qk_norm: str | None = None,
        eps: float | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.heads, self.kv_heads = hidden, heads, kv_heads or heads
        self.head_dim = head_dim or hidden // heads
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

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """x [batch, length, hidden]"""
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
        y = attend(q, k, v, kv_of, 0, length, self.sees, self.scale, mask)
        return self.o_proj(y.flatten(1)).unflatten(0, (batch, length))


def positions_of(given: Tensor | None, batch: int, length: int, past: int, device: torch.device) -> Tensor:
    """[batch * length], of all rows."""
    if given is None:
        return torch.arange(past, past + length, device=device).repeat(batch)
    return given.expand(batch, length).reshape(-1)


def whole_mask(mask: Tensor | None, batch: int, heads: int, length: int, keys: int, name: str) -> Tensor | None:
    """[batch or 1, heads or 1, length or 1, keys]

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
