"""Several layers of one input as one product: their weights side by side, and the result in their parts.

A layer whose result the loss does not use has no gradient, as a dense one has none: zeros would let an optimizer's
weight decay and momentum move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.compute.torch_calls import AutogradContext
from ndtp.runtime.joint_leaves import made_of


class Used:
    """The parts of a result that a backward has gradients of."""

    def __init__(self) -> None:
        self._task = -1
        self._parts: frozenset[int] = frozenset()

    def note(self, parts: frozenset[int]) -> None:
        self._task, self._parts = torch._C._current_graph_task_id(), parts  # type: ignore[attr-defined]

    def has(self, part: int) -> bool:
        """Whether the current backward has a gradient of a part."""
        return self._task != torch._C._current_graph_task_id() or part in self._parts  # type: ignore[attr-defined]


def side_by_side(parameters: Sequence[object], shards: Sequence[Tensor], parts: int, dim: int, used: Used) -> Tensor:
    """Features of several layers as those of one: each of `parts` parts of its result has some of all.

    Args:
        parameters: of which the shards are; None of one that is zero.
    """
    return made_of(parameters, shards, lambda given: _joined(given, parts, dim, used), used.has)


def parts_of(y: Tensor, widths: Sequence[int], used: Used) -> Sequence[Tensor]:
    """The parts of a result [rows, features], as copies: one of several views may not be changed in place."""
    return _Parts.apply(y, widths, used)  # type: ignore[no-any-return, no-untyped-call]


def _joined(shards: Sequence[Tensor], parts: int, dim: int, used: Used) -> Tensor:
    if torch.is_grad_enabled():
        return _SideBySide.apply(parts, dim, used, *shards)  # type: ignore[no-any-return, no-untyped-call]
    return _in_parts(shards, parts, dim)


def _in_parts(shards: Sequence[Tensor], parts: int, dim: int) -> Tensor:
    if parts == 1:
        return torch.cat(list(shards), dim)
    return torch.cat([shard.unflatten(dim, (parts, -1)) for shard in shards], dim + 1).flatten(dim, dim + 1)


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, parts: int, dim: int, used: Used, *shards: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parts, ctx.dim, ctx.used = parts, dim, used
        ctx.sizes = [shard.shape[dim] // parts for shard in shards]
        return _in_parts(shards, parts, dim)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:  # it waits for its sum
            return (None,) * (3 + len(ctx.sizes))
        dim, needs = ctx.dim, ctx.needs_input_grad[3:]
        each = grad.unflatten(dim, (ctx.parts, -1)).split(ctx.sizes, dim + 1)
        return None, None, None, *(
            g.flatten(dim, dim + 1) if wanted and ctx.used.has(i) else None
            for i, (g, wanted) in enumerate(zip(each, needs, strict=True))
        )  # fmt: skip


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, y: Tensor, widths: Sequence[int], used: Used) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.widths, ctx.used, ctx.rows, ctx.like = widths, used, y.shape[0], y.new_empty(0)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in y.split(list(widths), dim=1))

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor | None) -> tuple[Any, None, None]:
        ctx.used.note(frozenset(i for i, g in enumerate(grads) if g is not None))
        if all(g is None for g in grads):
            return None, None, None
        both = zip(grads, ctx.widths, strict=True)
        return torch.cat([ctx.like.new_zeros(ctx.rows, n) if g is None else g for g, n in both], 1), None, None
