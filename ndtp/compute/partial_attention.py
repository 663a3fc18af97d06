"""Attention to some of the keys, whose result is merged with that of others by its log-sum-exp; forward and backward.

    out  = sum over parts of exp(lse_part - lse) out_part        lse = log of the sum over parts of exp(lse_part)

Backward of a part needs the whole's `out` and `lse` and nothing of the other parts.  torch's own flash kernels give the
log-sum-exps, and take the whole's; products by hand stand in where a kernel does not know a size or a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import refuse_second

_ops = torch.ops.aten


class Seen(Protocol):
    """Some queries and some keys; `is_causal` where query i sees the keys up to i."""

    @property
    def queries(self) -> slice: ...

    @property
    def keys(self) -> slice: ...

    @property
    def is_causal(self) -> bool: ...


class SeenKeys(NamedTuple):
    """A `Seen`."""

    queries: slice
    keys: slice
    is_causal: bool


class Merged:
    """The attention of some queries to all the keys that have been seen so far.

    out      [.., heads, queries, d]     in fp32 at least
    lse      [.., heads, queries]        -inf where a query has seen nothing
    """

    def __init__(self, q: Tensor, features: int) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:-1], features), dtype=wide)
        self.lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)

    def see(
        self, q: Tensor, k: Tensor, v: Tensor, parts: Iterable[Seen], scale: float, mask: Tensor | None = None
    ) -> None:
        """Attend to more keys, [batch, kv heads, keys, d].

        Args:
            mask: [batch or 1, heads or 1, queries, keys], True where a query sees a key.
        """
        for part in parts:
            seen = None if mask is None else mask[..., part.queries, part.keys]
            found, lse = attend(q[..., part.queries, :], k[..., part.keys, :], v[..., part.keys, :], scale, part, seen)
            self._merge(part.queries, found, lse)

    def _merge(self, rows: slice, found: Tensor, lse: Tensor) -> None:
        before, out = self.lse[..., rows], self.out[..., rows, :]
        both = torch.logaddexp(before, lse)
        base = both.masked_fill(both == -torch.inf, 0.0)
        out.mul_((before - base).exp().unsqueeze(-1)).add_(found * (lse - base).exp().unsqueeze(-1))
        before.copy_(both)


class Gradients:
    """The gradients of some queries, added up over the keys that they see; see `Merged`."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        self.grad, self.q, self.out, self.scale = grad.contiguous(), q, out, scale
        self.lse = lse.masked_fill(lse == -torch.inf, 0.0)
        self.dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))

    def see(self, k: Tensor, v: Tensor, parts: Iterable[Seen], mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradients of these keys and values, in fp32 at least."""
        dk, dv = (torch.zeros_like(x, dtype=self.dq.dtype) for x in (k, v))
        for part in parts:
            rows, columns = part.queries, part.keys
            seen = None if mask is None else mask[..., rows, columns]
            mine = (self.grad[..., rows, :], self.q[..., rows, :], k[..., columns, :], v[..., columns, :])
            found = attend_backward(*mine, self.out[..., rows, :], self.lse[..., rows], self.scale, part, seen)
            for total, where, grad in zip((self.dq, dk, dv), (rows, columns, columns), found, strict=True):
                total[..., where, :] += grad
        return dk, dv


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float | None = None) -> Tensor:
    """Attend, from position `start` on, to keys of the whole sequence up to each query's own."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _Causal.apply(q, k, v, start, scale)  # type: ignore[no-untyped-call]
    return result


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, part: Seen, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to these keys alone, and the log-sum-exps of the scores."""
    if _has_kernel(q, v):
        bias = None if mask is None else _as_bias(mask, q)
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
            *map(_in_rows, (q, k, v)), 0.0, part.is_causal, attn_mask=bias, scale=scale
        )
    elif _has_device_kernel(q, v, mask):
        out, lse = _ops._scaled_dot_product_flash_attention(*_alike(q, k, v), 0.0, part.is_causal, scale=scale)[:2]
        lse = lse[..., : q.shape[-2]]
    else:
        scores = _scores(q, k, scale, part, mask)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
        out = weights.to(v.dtype) @ _repeated(v, q)
    if mask is not None:  # a kernel gives 0 for a query that sees nothing
        lse = lse.masked_fill(~mask.any(-1).expand(lse.shape), -torch.inf)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, part: Seen,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, and of these keys and values; `out` and `lse` are those of all keys."""
    if _has_kernel(q, v):
        bias = None if mask is None else _as_bias(mask, q)
        found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_in_rows, (grad, q, k, v, out)), lse.to(torch.promote_types(q.dtype, torch.float32)), 0.0,
            part.is_causal, attn_mask=bias, scale=scale,
        )  # fmt: skip
        return found  # type: ignore[no-any-return]
    if _has_device_kernel(q, v, mask):
        given, none = _alike(q, k, v), torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
            _in_rows(grad), *given, out, lse.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, part.is_causal,
            none, none, scale=scale,
        )  # fmt: skip
        return dq, _summed(dk, k), _summed(dv, v)
    scores = _scores(q, k, scale, part, mask)
    weights = (scores - lse.unsqueeze(-1)).exp()
    of_weights = (grad @ _repeated(v, q).transpose(-2, -1)).to(weights.dtype)
    delta = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    of_scores = (weights * (of_weights - delta) * scale).to(q.dtype)
    dk, dv = of_scores.transpose(-2, -1) @ q, weights.to(grad.dtype).transpose(-2, -1) @ grad
    return of_scores @ _repeated(k, q), _summed(dk, k), _summed(dv, v)


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type in ("cpu", "meta") and q.dim() == 4 and q.shape[-1] == v.shape[-1]


def _has_device_kernel(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    is_fit = q.dim() == 4 and q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cuda" and is_half and is_fit and mask is None


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _in_rows(q), _in_rows(_repeated(k, q)), _in_rows(_repeated(v, q))


def _in_rows(x: Tensor) -> Tensor:
    """Return a tensor whose features follow one another in memory, as torch's kernels take for granted."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with as many heads as the queries have."""
    times = q.shape[-3] // x.shape[-3]
    return x if times == 1 else x.repeat_interleave(times, -3)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of `_repeated`."""
    times = grad.shape[-3] // like.shape[-3]
    return grad if times == 1 else grad.unflatten(-3, (like.shape[-3], times)).sum(-3)


def _as_bias(mask: Tensor, q: Tensor) -> Tensor:
    return torch.zeros((), dtype=q.dtype, device=q.device).expand(mask.shape).masked_fill(~mask, -torch.inf)


def _scores(q: Tensor, k: Tensor, scale: float, part: Seen, mask: Tensor | None) -> Tensor:
    scores = (q @ _repeated(k, q).transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if part.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        mask = seen if mask is None else mask & seen
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
        merged, parts = Merged(q, v.shape[-1]), _pieces_from(start, q, k)
        merged.see(q, k, v, parts, scale)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Any:
        refuse_second("attention of split sequences")
        q, k, v, out, lse = ctx.saved_tensors
        own = Gradients(grad, q, out, lse, ctx.scale)
        dk, dv = own.see(k, v, ctx.parts)
        return own.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _pieces_from(start: int, q: Tensor, k: Tensor) -> list[SeenKeys]:
    """Return the keys in front of the queries, which all of them see, and their own; rows of padding see none."""
    stop = min(start + q.shape[-2], k.shape[-2])
    if stop <= start:
        return []
    queries, own = slice(0, stop - start), SeenKeys(slice(0, stop - start), slice(start, stop), True)
    return [SeenKeys(queries, slice(0, start), False), own] if start else [own]
