"""Reductions over axes: parts of sums, and what ranks use on their own, by relayouts that are differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import MergePlan, RelayoutPlan
from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import refuse_batched
from ndtp.errors import LayoutError
from ndtp.ops.moving import as_own, enter, moved

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


def reduce(x: Tensor, plan: RelayoutPlan, mesh: GridLike, backward: str = "dgrad") -> Tensor:
    """`x` along a relayout, sums over axes included; see `ndtp.relayout`, which makes the plan.

        x        a shard of X as `plan.source`, and a part of a sum over the axes `plan.partial`
        returns  the shard of the sum as `plan.target`

        forward  AR, RS, AG ... as `plan.steps` say         dgrad  `plan.back.steps`

    The gradient of a tensor is whole: every rank that uses the result in the same way has the same gradient of it.
    Where ranks along an axis use it each for something of its own, theirs are parts of a sum, and the axis belongs in
    `plan.grad_partial`.  It is linear, so it can be differentiated as often as wanted.

    Args:
        backward: the phase of the gradient, in eager code.

    Raises:
        LayoutError: shards that do not fit the plan, or a plan for another grid.
    """
    if plan.grid is not mesh.grid and plan.grid != mesh.grid:
        raise LayoutError(
            f"relayout '{plan.name}': {plan.source} lies on grid {plan.grid}, the process grid is {mesh.grid}"
        )
    if torch.compiler.is_compiling():
        from ndtp.ops.compiled_reductions import compiled_reduce

        return compiled_reduce(x, plan, mesh)
    if not plan.is_identity:
        enter(mesh, plan, x)
    plan.global_shape(x.shape)
    if plan.is_identity:
        return x
    result: Tensor = _Reduce.apply(x, plan, mesh, "forward", backward)  # type: ignore[no-untyped-call]
    return result


def sum_over(x: Tensor, layout: Layout, axes: Sequence[str], mesh: GridLike, name: str = "sum") -> Tensor:
    """The sum of `x` over the ranks along `axes`, on each of them; `layout` is that of x and of the sum.

    Raises:
        LayoutError: an axis that splits x.
    """
    return reduce(x, relayout_plan(layout, layout, tuple(axes), (), name), mesh)


def used_over(x: Tensor, layout: Layout, axes: Sequence[str], mesh: GridLike, name: str = "used") -> Tensor:
    """`x` as it is, to be used by the ranks along `axes` each for something of its own: its gradient is summed.

    Raises:
        LayoutError: an axis that splits x.
    """
    return reduce(x, relayout_plan(layout, layout, (), tuple(axes), name), mesh)


_cached_plan = lru_cache(maxsize=4096)(RelayoutPlan)


def relayout_plan(
    source: Layout,
    target: Layout,
    partial: tuple[str, ...],
    grad_partial: tuple[str, ...],
    name: str,
    kind: str = "",
) -> RelayoutPlan:
    """The plan, made once; a compiler warns of a cache."""
    made = RelayoutPlan if torch.compiler.is_compiling() else _cached_plan
    return made(source, target, partial, grad_partial, name, kind)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, plan: RelayoutPlan, mesh: GridLike, phase: str, backward: str
    ) -> Tensor:
        ctx.plan, ctx.mesh, ctx.backward = plan, mesh, backward
        result = moved(x, plan.steps, mesh, plan.name, phase, plan.kind)
        return result.view_as(result) if result is x else as_own(result, x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        refuse_batched(grad, ctx.plan.name)
        ctx.mesh.step.late.enter()
        # By itself, the other way: so a gradient of gradients is right, too.
        back = _Reduce.apply(grad, ctx.plan.back, ctx.mesh, ctx.backward, ctx.backward)  # type: ignore[no-untyped-call]
        return back, None, None, None, None


def merged(
    x: Tensor, plan: MergePlan, merge: Callable[[Tensor], Tensor], mesh: GridLike, name: str, phase: str = "forward"
) -> Tensor:
    """Merge each row's statistics of all ranks along `plan.axes`; the result is not differentiable.

    Args:
        x: [given, rows], of this rank.
        merge: [ranks, given, rows] -> [merged, rows], the ranks in the order of `plan.axes`, the first the major one.

    Returns:
        [merged, rows], the same on every rank along the axes.
    """
    if plan.ranks == 1:
        return merge(x.unsqueeze(0))
    rows = x.shape[1]
    x = F.pad(x, (0, plan.padded(rows) - rows)) if plan.padded(rows) != rows else x
    both = moved(x, (plan.exchange,), mesh, name, phase)
    result = merge(both.unflatten(0, (plan.ranks, plan.given)))
    if plan.spread is not None:
        result = moved(result, (plan.spread,), mesh, name, phase)
    return result[:, :rows]
