"""Attention of sequences that are split over ranks: a ring, whose products merge.

q, k, v    [batch, heads, positions / p, d]     this rank's part of every sequence
returns    [batch, heads, positions / p, d of v]

ring       for each of p turns: out, lse = merge(out, lse, attention(q, k, v));  k, v = PASS(k, v)
backward   the same turns once more, with dk and dv passed on behind k and v
wire       the owner of keys and values brings them to their form on the wire once, and all ranks pass that on, so that
           all of them, the owner too, attend to the same numbers; dk and dv are sums, and travel as they are computed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ndtp.algebra.ring_plan import RingPlan
from ndtp.algebra.steps import Step
from ndtp.algebra.wire import BACK
from ndtp.compute.partial_attention import Gradients, Merged
from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import refuse_second
from ndtp.ops.moving import enter, sent

if TYPE_CHECKING:
    from ndtp.collectives.codecs import Codec
    from ndtp.runtime.grid_like import GridLike

NAME, KIND = "ring attention", "activations"
MOST_GROUPS = 2  # of heads, each with messages of its own


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, mesh: GridLike, scale: float | None = None,
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


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        plan: RingPlan,
        mesh: GridLike,
        scale: float,
    ) -> Tensor:
        index = mesh.grid.index(mesh.rank, plan.axes)
        groups, masks = _groups(q, *(_coded(x, mesh, KIND) for x in (k, v))), _masks(mask, q, k)
        coming: list[Any] = [_swapping(group, plan, mesh, "forward") for group in groups]
        merged, kept, outs = [], [], []
        widths, forms = (k.shape[-1], v.shape[-1]), [[PackedForm.of(x) for x in group[1:]] for group in groups]
        for turn in range(plan.ranks):
            for i in range(len(groups)):
                if turn == 0:
                    groups[i] = coming[i]()
                    merged.append(Merged(groups[i][0], v.shape[-1]))
                    block = _packed(groups[i][1:])
                else:
                    block = coming[i]()
                if turn < plan.ranks - 1:
                    coming[i] = _passed(block, plan, mesh, "forward")
                keys, values = _keys_of(block, forms[i], widths, q.dtype, mesh)
                here, seen = plan.pieces(index, turn), _columns(masks[i], plan, index, turn)
                merged[i].see(groups[i][0], keys, values, here, scale, seen)
                if turn == plan.ranks - 1:
                    out = merged[i].out.to(q.dtype)
                    kept += [*groups[i], out, merged[i].lse]
                    outs.append(_swapping((out,), plan, mesh, "forward"))
        ctx.save_for_backward(mask, *kept)
        ctx.plan, ctx.mesh, ctx.scale, ctx.index = plan, mesh, scale, index
        ctx.widths = k.shape[-1], v.shape[-1]
        found = [result for each in outs for result in each()]
        return torch.cat(found, -3) if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Any:
        refuse_second("attention of split sequences")
        plan, mesh, index = ctx.plan, ctx.mesh, ctx.index
        mesh.step.late.enter()
        mask, *saved = ctx.saved_tensors
        kept = [saved[i : i + 5] for i in range(0, len(saved), 5)]
        masks = _masks(mask, grad, kept[0][1], len(kept))
        coming: list[Any] = [_swapping((part,), plan, mesh, "dgrad") for part in grad.chunk(len(kept), -3)]
        own, sums, ends = [], list[Any](), []
        for turn in range(plan.ranks):
            for i, (q, k, v, out, lse) in enumerate(kept):
                if turn == 0:
                    own.append(Gradients(coming[i]()[0], q, out, lse, ctx.scale))
                    block = _packed((k, v))
                else:
                    block = coming[i]()
                if turn < plan.ranks - 1:
                    coming[i] = _passed(block, plan, mesh, "dgrad")
                keys, values = _keys_of(block, (PackedForm.of(k), PackedForm.of(v)), ctx.widths, q.dtype, mesh)
                here, seen = plan.pieces(index, turn), _columns(masks[i], plan, index, turn)
                total = _packed(own[i].see(keys, values, here, seen))
                if turn == 0:
                    sums.append(_passed(total, plan, mesh, "dgrad"))
                else:
                    total += sums[i]()
                    sums[i] = _passed(total, plan, mesh, "dgrad")
        for i, (q, *coded, _, _) in enumerate(kept):
            wide = [PackedForm((*x.shape[:-1], width), total.dtype) for x, width in zip(coded, ctx.widths, strict=True)]
            dk, dv = (x.to(q.dtype) for x in _unpacked(sums[i](), wide))
            ends.append(_swapping((own[i].dq.to(q.dtype), dk, dv), plan, mesh, "dgrad"))
        found = zip(*(end() for end in ends), strict=True)
        return *(torch.cat(parts, -3) if len(parts) > 1 else parts[0] for parts in found), None, None, None, None


def _groups(*tensors: Tensor) -> list[Sequence[Tensor]]:
    """Return queries, keys and values of two groups of heads, or of one where two do not divide the heads.

    While a message of one group is under way, the other one's products run: the first and the last message of a phase
    have none of their own group beside them.
    """
    count = math.gcd(MOST_GROUPS, *(x.shape[-3] for x in tensors))
    return list(zip(*(x.chunk(count, -3) for x in tensors), strict=True))


def _masks(mask: Tensor | None, q: Tensor, k: Tensor, groups: int | None = None) -> list[Tensor | None]:
    """Return the part of a mask for the heads of each group."""
    count = len(_groups(q, k)) if groups is None else groups
    if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
        return [mask] * count
    return list(mask.chunk(count, -3))


class PackedForm(NamedTuple):
    """The shape and the dtype of one of the tensors that a message holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> PackedForm:
        return cls(tuple(x.shape), x.dtype)


def _codec(mesh: GridLike, width: int, dtype: torch.dtype, kind: str) -> Codec | None:
    return mesh.collectives.codec((1, width), dtype, kind)


def _coded(x: Tensor, mesh: GridLike, kind: str) -> Tensor:
    """Return a tensor as it travels: the bytes of each row and its scale, [.., bytes]; itself where it has no codec."""
    codec = _codec(mesh, x.shape[-1], x.dtype, kind)
    return x if codec is None else codec.encode_rows(x.detach().reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _decoded(x: Tensor, width: int, dtype: torch.dtype, mesh: GridLike, kind: str = KIND) -> Tensor:
    """Return the tensor [.., width] in `dtype` that travels as `x`."""
    codec = _codec(mesh, width, dtype, kind)
    if codec is None:
        return x
    return codec.decode_rows(x.reshape(-1, x.shape[-1]), width, dtype).view(*x.shape[:-1], width)


def _keys_of(
    block: Tensor, forms: Sequence[PackedForm], widths: Sequence[int], dtype: torch.dtype, mesh: GridLike
) -> list[Tensor]:
    """Return the keys and values of a message."""
    parts = _unpacked(block, forms)
    return [_decoded(x, width, dtype, mesh) for x, width in zip(parts, widths, strict=True)]


def _passed(x: Tensor, plan: RingPlan, mesh: GridLike, phase: str) -> object:
    if plan.ranks == 1:
        return lambda: x
    return sent(x, (plan.pass_on,), mesh, NAME, phase, KIND)


def _swapping(tensors: Sequence[Tensor], plan: RingPlan, mesh: GridLike, phase: str) -> Callable[[], Sequence[Tensor]]:
    """Begin to swap the second halves of parts of the sequence, by one message; the same on the way back."""
    if not plan.is_zigzag:
        return lambda: tensors
    kind = KIND if phase == "forward" else BACK[KIND]
    halves = [x[..., plan.half :, :] for x in tensors]
    coded = [_coded(x, mesh, kind) for x in halves]
    step: Step = plan.swap
    come = sent(_packed(coded), (step,), mesh, NAME, phase, kind)

    def swapped() -> Sequence[Tensor]:
        came = _unpacked(come(), [PackedForm.of(x) for x in coded])
        there = [_decoded(x, own.shape[-1], own.dtype, mesh, kind) for x, own in zip(came, halves, strict=True)]
        return [torch.cat((x[..., : plan.half, :], half), -2) for x, half in zip(tensors, there, strict=True)]

    return swapped


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    flat = [x.reshape(-1) for x in tensors]
    if len({x.dtype for x in flat}) > 1:
        flat = [x.view(torch.uint8) for x in flat]
    return torch.cat(flat)


def _unpacked(flat: Tensor, forms: Sequence[PackedForm]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) * dtype.itemsize // flat.itemsize for shape, dtype in forms])
    # Bytes between which others lie may begin at any address.
    parts = [x if x.dtype == dtype else x.clone().view(dtype) for x, (_, dtype) in zip(parts, forms, strict=True)]
    return [part.view(shape) for part, (shape, _) in zip(parts, forms, strict=True)]


def _columns(mask: Tensor | None, plan: RingPlan, index: int, turn: int) -> Tensor | None:
    """Return the part of a mask that belongs to the keys of a turn."""
    if mask is None:
        return None
    start = plan.source(index, turn) * plan.part
    return mask[..., start : start + plan.part]
