"""The core of an attention on one rank: some rows and heads of queries, whole sequences of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.compute.constants import numbers_on
from ndtp.compute.partial_attention import causal_attention

Drop = Callable[..., Tensor]


@dataclass(frozen=True)
class Sees:
    """The keys that a query sees, by positions within their sequence.

    Args:
        causal: none behind its own.
        window: none that is so far away or farther; None: no bound.
    """

    causal: bool = False
    window: int | None = None

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return the mask [queries, keys], True where a query sees a key; None where every query sees every key."""
        distance = queries[:, None] - keys
        seen = None
        if self.causal:
            seen = distance >= 0
        if self.window is not None:
            near = distance.abs() < self.window
            seen = near if seen is None else seen & near
        return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_of: Sequence[int],
    first_row: int,
    length: int,
    sees: Sees,
    scale: float | None = None,
    mask: Tensor | None = None,
    drop: Drop | None = None,
    is_split: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of rows that need not be whole sequences.

    Args:
        q: [rows, heads, d], queries from row `first_row` on of the sequences below, which have `length` queries each.
        k, v: [sequences, keys, kv heads, d]: `keys - length` older ones in front.
        kv_of: which of the kv heads is that of each head.
        sees: by position.
        scale: default: 1 / sqrt(d).
        mask: [sequences or 1, heads or 1, length or 1, keys], of booleans (True sees) or added to the scores.
        is_split: whether the rows are those of one rank, whose layer refuses a gradient of their gradient.
        drop: called with the weights [sequences, heads, queries, keys] of a part, its first sequence and first query.

    Returns:
        [rows, heads, d of v]
    """
    past = k.shape[1] - length
    k, v, shared = _for_heads(k, v, kv_of)
    parts, row, stop = [], first_row, first_row + q.shape[0]
    if row == 0 and stop == k.shape[0] * length:
        spans = [(0, k.shape[0], 0, length)]
    else:  # sequence by sequence, as far as it is there
        spans = []
        while row < stop:
            sequence, begin = divmod(row, length)
            end = min(length, begin + stop - row)
            spans.append((sequence, sequence + 1, begin, end))
            row += end - begin
    row = 0
    for first, last, begin, end in spans:
        count = (last - first) * (end - begin)
        queries = q[row : row + count].unflatten(0, (last - first, end - begin)).transpose(1, 2)
        keys, values = (x[first:last].transpose(1, 2) for x in (k, v))
        part = None if drop is None else partial(drop, first=first, begin=begin)
        cut = _cut(mask, first, last, begin, end)
        found = _core(queries, keys, values, past + begin, sees, scale, cut, shared, part, is_split)
        parts.append(found.transpose(1, 2).flatten(0, 1))
        row += count
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _core(
    q: Tensor, k: Tensor, v: Tensor, position: int, sees: Sees, scale: float | None, mask: Tensor | None, shared: bool,
    drop: Callable[[Tensor], Tensor] | None = None, is_split: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention of queries [sequences, heads, .., d] that begin at `position`."""
    is_plain = sees.window is None and mask is None and drop is None
    if (is_plain and position == 0 and q.shape[2] == k.shape[2]) or q.shape[2] == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=sees.causal, scale=scale, enable_gqa=shared)
    if is_plain and sees.causal and is_split and q.shape[2] > 1:
        return causal_attention(q, k, v, position, scale)
    if is_plain and (q.shape[2] == 1 or not sees.causal):  # a token at the end sees all keys
        stop = position + 1 if sees.causal else k.shape[2]
        return F.scaled_dot_product_attention(q, k[:, :, :stop], v[:, :, :stop], scale=scale, enable_gqa=shared)
    queries = torch.arange(position, position + q.shape[2], device=q.device)
    seen = sees.mask(queries, torch.arange(k.shape[2], device=q.device))
    if seen is not None and mask is not None:
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
    elif mask is None:
        mask = seen
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    if drop is not None:
        if shared:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return drop(attention_weights(q, k, scale, mask)) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)


def attention_weights(q: Tensor, k: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """Return the weights [sequences, heads, queries, keys] of queries and keys [sequences, heads, .., d], by softmax
    in fp32 or wider.

    Args:
        mask: of booleans (True sees), or added to the scores.
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)


def _for_heads(k: Tensor, v: Tensor, kv_of: Sequence[int]) -> tuple[Tensor, Tensor, bool]:
    """Keys and values as the core takes them, and whether every head has as many heads of queries, in their order."""
    heads = k.shape[2]
    if list(kv_of) == list(range(heads)):
        return k, v, False
    if len(kv_of) % heads == 0 and list(kv_of) == [i // (len(kv_of) // heads) for i in range(len(kv_of))]:
        return k, v, True
    chosen = numbers_on(kv_of, k.device)
    return k.index_select(2, chosen), v.index_select(2, chosen), False


def _cut(mask: Tensor | None, first: int, last: int, begin: int, end: int) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[first:last] if mask.shape[0] > 1 else mask
    return mask[:, :, begin:end] if mask.shape[2] > 1 else mask
