"""`F.multi_head_attention_forward` of split tensors, by its parts: torch's function is one piece, which no rule splits.

Heads, sequences and features lie as the rules of products, views and `scaled_dot_product_attention` let them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.compute.torch_calls import TorchFunction
from ndtp.errors import LayoutError
from ndtp.split.tensor import rule


def attended(
    q: Tensor, k: Tensor, v: Tensor, heads: int, *, batch_first: bool, mask: Tensor | None = None,
    padding: Tensor | None = None, dropout: float = 0.0, weights: bool = False, averages: bool = True,
    is_causal: bool = False, more: tuple[Tensor | None, Tensor | None] = (None, None), zeros: bool = False, name: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Multi-head attention between its projections.

    Args:
        q, k, v: [batch, length, features], or [length, batch, features].
        mask: [length, keys] or [batch * heads, length, keys]; True does not see, a number is added to scores.
        padding: [batch, keys] likewise.
        weights: whether weights are returned, [batch, length, keys] where `averages`, else [batch, heads, ..].
        is_causal: `mask` is the causal one.
        more: [1, 1, features], a key and a value that follow all others; `zeros`: and so do a key and value of zeros.

    Returns:
        The values that queries found, of the form of `q`, and weights or None.

    Raises:
        LayoutError: a mask has another shape.
    """
    if is_causal and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch does
    is_causal = is_causal and padding is None and not weights
    batch, length, keys = (q.shape[0], q.shape[1], k.shape[1]) if batch_first else (q.shape[1], q.shape[0], k.shape[0])
    seen = None if is_causal else _mask(mask, padding, (batch, heads, length, keys), q.dtype, name)
    extra = [x for x in more if x is not None]
    if extra:
        k, v = (torch.cat([x, y.expand_as(x.narrow(int(batch_first), 0, 1))], int(batch_first))
                for x, y in zip((k, v), extra, strict=True))  # fmt: skip
    order = (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)
    q, k, v = (x.unflatten(-1, (heads, -1)).permute(order) for x in (q, k, v))
    if zeros:
        k, v = (torch.cat([x, torch.zeros_like(x.narrow(2, 0, 1))], 2) for x in (k, v))
    if seen is not None and (grown := len(extra) // 2 + zeros):
        seen = F.pad(seen, (0, grown), value=True if seen.dtype == torch.bool else 0.0)
    found = None
    if weights:
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]))
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen
        found = F.dropout(torch.softmax(scores, -1), dropout, dropout > 0.0)
        y = torch.matmul(found, v)
        found = found.mean(1) if averages else found
    else:
        y = F.scaled_dot_product_attention(q, k, v, seen, dropout, is_causal)
    y = y.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3))
    return y.flatten(2), found


def _mask(
    mask: Tensor | None, padding: Tensor | None, sizes: tuple[int, int, int, int], dtype: torch.dtype, name: str
) -> Tensor | None:
    """Return one mask of all of [batch, heads, length, keys]: True sees, and a number is added to scores."""
    batch, heads, length, keys = sizes
    parts = []
    if mask is not None:
        both = (length, keys), (batch * heads, length, keys)
        if tuple(mask.shape) not in both:
            raise LayoutError(f"'{name}': attn_mask is {tuple(mask.shape)}; it is {both[0]} or {both[1]}")
        parts.append(mask if mask.dim() == 2 else mask.view(batch, heads, length, keys))
    if padding is not None:
        if tuple(padding.shape) != (batch, keys):
            raise LayoutError(f"'{name}': key_padding_mask is {tuple(padding.shape)}; it is {(batch, keys)}")
        parts.append(padding[:, None, None, :])
    if not parts:
        return None
    if all(part.dtype == torch.bool for part in parts):
        seen = ~parts[0]
        return seen if len(parts) == 1 else seen & ~parts[1]
    added = [
        torch.zeros_like(part, dtype=dtype).masked_fill(part, -math.inf) if part.dtype == torch.bool else part.to(dtype)
        for part in parts
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


@rule(F.multi_head_attention_forward)
def _multi_head_attention_forward(
    func: TorchFunction, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None,
    add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None,
    training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None, static_k: Tensor | None = None,
    static_v: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> object:  # fmt: skip
    """Queries, keys and values are [length, batch, features], or [length, features]."""
    if static_k is not None or static_v is not None:
        return NotImplemented
    is_batched = query.dim() == 3
    given = [x if is_batched else x.unsqueeze(1) for x in (query, key, value)]
    padding = key_padding_mask[None] if key_padding_mask is not None and not is_batched else key_padding_mask
    biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights: Any = separate if use_separate_proj_weight or in_proj_weight is None else in_proj_weight.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(given, weights, biases, strict=True))
    y, found = attended(
        q, k, v, num_heads, batch_first=False, mask=attn_mask, padding=padding, dropout=dropout_p if training else 0.0,
        weights=need_weights, averages=average_attn_weights, is_causal=is_causal, more=(bias_k, bias_v),
        zeros=add_zero_attn, name="multi_head_attention_forward",
    )  # fmt: skip
    y = F.linear(y, out_proj_weight, out_proj_bias)
    return (y, found) if is_batched else (y.squeeze(1), None if found is None else found[0])
