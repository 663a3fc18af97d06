"""Attention of sequences that are split over ranks, by products that merge: over a ring, or to gathered keys.

q, k, v    [batch, heads, positions / p, d]     this rank's part of every sequence
returns    [batch, heads, positions / p, d of v]

ring       for each of p turns: out, lse = merge(out, lse, attention(q, k, v));  k, v = PASS(k, v)
backward   the same turns once more, with dk and dv passed on behind k and v
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.algebra.attention_pieces import pieces
from ndtp.algebra.ring_plan import RingPlan
from ndtp.algebra.steps import Step
from ndtp.compute.partial_attention import Gradients, Merged
from ndtp.ops.moving import enter, sent

if TYPE_CHECKING:
    from ndtp.runtime.process_grid import ProcessGrid

NAME = "ring attention"


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, mesh: ProcessGrid, scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend to all keys, of which each rank has a part; see this module.

    Args:
        mask: [batch or 1, heads or 1, positions / p, p parts of keys], True where a query sees a key; not with a plan
            that is causal.
    """
    enter(mesh, plan, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _Ring.apply(q, k, v, mask, plan, mesh, scale)  # type: ignore[no-untyped-call]
    return result


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float | None = None) -> Tensor:
    """Attend, from position `start` on, to keys of the whole sequence up to each query's own."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _Causal.apply(q, k, v, start, scale)  # type: ignore[no-untyped-call]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: RingPlan, mesh: ProcessGrid, scale: float
    ) -> Tensor:
        index = mesh.grid.index(mesh.rank, plan.axes)
        q, k, v = _swapped((q, k, v), plan, mesh, "forward")
        merged, block = Merged(q, v.shape[-1]), _packed((k, v))
        for turn in range(plan.ranks):
            coming = _passed(block, plan, mesh, "forward") if turn < plan.ranks - 1 else None
            here, seen = plan.pieces(index, turn), _columns(mask, plan, index, turn)
            keys, values = _unpacked(block, (k, v))
            merged.see(q, keys, values, here, scale, seen)
            block = block if coming is None else coming()
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse, mask)
        ctx.plan, ctx.mesh, ctx.scale, ctx.index = plan, mesh, scale, index
        (result,) = _swapped((out,), plan, mesh, "forward")
        return result.view_as(result) if result is out else result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        plan, mesh, index = ctx.plan, ctx.mesh, ctx.index
        mesh.step.late.enter()
        q, k, v, out, lse, mask = ctx.saved_tensors
        (grad,) = _swapped((grad,), plan, mesh, "dgrad")
        own, block, sums, coming_sums = Gradients(grad, q, out, lse, ctx.scale), _packed((k, v)), None, None
        for turn in range(plan.ranks):
            coming = _passed(block, plan, mesh, "dgrad") if turn < plan.ranks - 1 else None
            here, seen = plan.pieces(index, turn), _columns(mask, plan, index, turn)
            keys, values = _unpacked(block, (k, v))
            found = own.see(keys, values, here, seen)
            sums = _packed(found)
            if coming_sums is not None:
                sums += coming_sums()
            coming_sums = _passed(sums, plan, mesh, "dgrad")
            block = block if coming is None else coming()
        assert coming_sums is not None
        dk, dv = (x.to(k.dtype) for x in _unpacked(coming_sums(), (k, v)))
        return (*_swapped((own.dq.to(q.dtype), dk, dv), plan, mesh, "dgrad"), None, None, None, None)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
        merged, parts = Merged(q, v.shape[-1]), _pieces_from(start, q, k)
        merged.see(q, k, v, parts, scale)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        own = Gradients(grad, q, out, lse, ctx.scale)
        dk, dv = own.see(k, v, ctx.parts)
        return own.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _pieces_from(start: int, q: Tensor, k: Tensor) -> Any:
    keys = k.shape[-2]
    return pieces([range(start, start + q.shape[-2])], [range(keys)], keys, True)


def _passed(x: Tensor, plan: RingPlan, mesh: ProcessGrid, phase: str) -> Any:
    if plan.ranks == 1:
        return lambda: x
    return sent(x, (plan.pass_on,), mesh, NAME, phase)


def _swapped(tensors: Sequence[Tensor], plan: RingPlan, mesh: ProcessGrid, phase: str) -> list[Tensor]:
    """Return parts of the sequence with their second halves swapped, by one message; the same on the way back."""
    if not plan.is_zigzag:
        return list(tensors)
    halves = [x[..., plan.half :, :] for x in tensors]
    step: Step = plan.swap
    come = _unpacked(sent(_packed(halves), (step,), mesh, NAME, phase)(), halves)
    return [torch.cat((x[..., : plan.half, :], half), -2) for x, half in zip(tensors, come, strict=True)]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def _columns(mask: Tensor | None, plan: RingPlan, index: int, turn: int) -> Tensor | None:
    """Return the part of a mask that belongs to the keys of a turn."""
    if mask is None:
        return None
    start = plan.source(index, turn) * plan.part
    return mask[..., start : start + plan.part]
