"""Parameters of a grid taken whole, in part, or elsewhere, and tensors put on the grid: differentiably."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ndtp.compute.torch_calls import Arguments, AutogradContext, Keywords
from ndtp.runtime.grid_parts import on_every_rank, part_of
from ndtp.runtime.halves import dense_part


class TakenWhole(torch.autograd.Function):
    """`full_tensor`: its gradient is whole on every rank, which takes its part."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Any) -> Tensor:
        ctx.like, ctx.kind = x._dtensor, type(x)
        whole = x._dtensor.full_tensor()
        return dense_part(whole, x.ndtp_real)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Any) -> Any:
        like, grad = ctx.like, grad.full_tensor() if isinstance(grad, DTensor) else grad
        return PutInPlace.apply(grad, like.placements, like.device_mesh, like.shape, ctx.kind)  # type: ignore[no-untyped-call]


class PutInPlace(torch.autograd.Function):
    """A tensor that every rank has, as one on the grid; its gradient is whole on every rank."""

    @staticmethod
    def forward(
        ctx: AutogradContext, dense: Tensor, placements: Any, device_mesh: Any, shape: torch.Size, kind: Any
    ) -> Any:
        strides = torch.empty(shape, device="meta").stride()
        with torch.no_grad():
            like = DTensor.from_local(
                dense.new_empty((0,) * len(shape)),
                device_mesh,
                placements,
                run_check=False,
                shape=shape,
                stride=strides,
            )
            local = part_of(dense.detach(), like)
        return kind(DTensor(local, like._spec, requires_grad=False), False, dense.shape)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Any) -> Any:
        return grad.full_tensor() if isinstance(grad, DTensor) else grad, None, None, None, None


class Moved(torch.autograd.Function):
    """`redistribute` of one with padding, which stays behind its sizes while it is split."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Any, args: Arguments, kwargs: Keywords) -> Any:
        ctx.like, ctx.kind = x._dtensor, type(x)
        moved = x._dtensor.redistribute(*args, **kwargs)
        if x.is_padded and all(placement.is_replicate() for placement in moved.placements):
            moved = on_every_rank(dense_part(moved.to_local(), x.ndtp_real), moved)
        return type(x)(moved, False, x.ndtp_real)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Any) -> Any:
        like = ctx.like
        if isinstance(grad, DTensor):
            if getattr(grad, "_dtensor", grad).shape == like.shape:
                return grad.redistribute(placements=like.placements), None, None
            grad = grad.full_tensor()
        put = PutInPlace.apply(grad, like.placements, like.device_mesh, like.shape, ctx.kind)  # type: ignore[no-untyped-call]
        return put, None, None


class ToLocal(torch.autograd.Function):
    """`to_local`."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Any, is_sum: bool) -> Tensor:
        ctx.spec, ctx.real, ctx.kind, ctx.is_sum = x._spec, x.ndtp_real, type(x), is_sum
        local = x._local_tensor
        return local.view_as(local)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return OfShard.apply(grad, ctx.spec, ctx.real, ctx.kind, ctx.is_sum), None  # type: ignore[no-untyped-call]


class OfShard(torch.autograd.Function):
    """The gradient of `to_local`: a shard as one on the grid."""

    @staticmethod
    def forward(ctx: AutogradContext, local: Tensor, spec: Any, real: Any, kind: Any, is_sum: bool) -> Any:
        ctx.spec = spec
        made = kind(DTensor(local.detach().contiguous(), spec, requires_grad=False), False, real)
        if is_sum:
            made.ndtp_is_sum = True
        return made

    @staticmethod
    def backward(ctx: AutogradContext, grad: Any) -> Any:
        spec = ctx.spec
        if isinstance(grad, DTensor):
            is_split = any(not placement.is_replicate() for placement in spec.placements)
            if is_split and getattr(grad, "_dtensor", grad).shape == spec.shape:
                return grad.redistribute(placements=spec.placements).to_local(), None, None, None, None
            grad = grad.full_tensor()  # without padding
        like = DTensor(grad.new_empty((0,) * grad.dim()), spec, requires_grad=False)
        return part_of(grad, like), None, None, None, None
