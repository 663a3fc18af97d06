"""The moves of tensors for operations other than products, and the sums of their parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.steps import Step
from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import refuse_batched
from ndtp.runtime.arrival import Deferred, local_shard, taken_in
from ndtp.runtime.chain import signature_of
from ndtp.runtime.moves import Move, Way

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


def moved(x: Tensor, steps: Sequence[Step], mesh: GridLike, name: str, phase: str, kind: str = "") -> Tensor:
    """The tensor at the end of its steps.

    Args:
        kind: of the tensor, as `ndtp.Wire` has them; "": it travels as it is.
    """
    if not steps:
        return x
    return way_of(x, steps, mesh, name, phase, kind).carried(x)


def sent(
    x: Tensor, steps: Sequence[Step], mesh: GridLike, name: str, phase: str, kind: str = ""
) -> Callable[[], Tensor]:
    """Send a tensor off; what is returned waits for the end of its steps."""
    return way_of(x, steps, mesh, name, phase, kind).start(x).wait


def way_of(x: Tensor, steps: Sequence[Step], mesh: GridLike, name: str, phase: str, kind: str = "") -> Way:
    """Return the way of tensors such as this one through their steps, bound where one is met first."""
    shape = tuple(x.shape)
    key = (mesh.collectives, tuple(steps), name, phase, shape, x.dtype, kind)
    return mesh.programs.way(key, lambda: Way(mesh.collectives, steps, (name,), phase, shape, x.dtype, kind=kind))


def enter(mesh: GridLike, op: object, x: Tensor) -> None:
    """Begin an operation: end what a broken backward has left, and compare ranks if the mesh checks.

    A graph has operations that do so.
    """
    if torch.compiler.is_compiling():
        return
    mesh.step.late.enter()
    if mesh.check:
        from ndtp.collectives.cross_check import cross_check

        cross_check(mesh.groups, f"{op}; {signature_of(x)}")


def taken(parameter: Tensor, plan: RelayoutPlan, mesh: GridLike) -> Tensor:
    """This rank's shard of a parameter on its way to where it is used, with a gradient that is reduced late.

    As that of a product's weight: its first collective starts where backward comes by, the next ones behind the
    products that follow, and it is waited for as late as possible; what an all-reduce would finish is held back under
    `ProcessGrid.accumulate`.
    """
    deferred = None
    if plan.back.steps and parameter.requires_grad and torch.is_grad_enabled():
        shard, deferred = taken_in(parameter, mesh.step.late.backward.numbers, parameter)
        mesh.step.note_uses([plan.name], deferred.leaf is not None, shard.grad_fn)
    else:
        shard = local_shard(parameter)
    if plan.is_identity:
        return shard
    used: Tensor = _Used.apply(shard, plan, mesh, deferred)  # type: ignore[no-untyped-call]
    if deferred is not None and used.grad_fn is not None:
        mesh.step.late.backward.numbers.end_product()
    return used


def as_own(x: Tensor, *others: Tensor | None) -> Tensor:
    """A tensor as no view, unless `others` share its memory: what a Function of autograd gives may be changed so."""
    if not x._is_view():
        return x
    memory = x.untyped_storage()._cdata
    if any(other is not None and other.untyped_storage()._cdata == memory for other in others):
        return x
    return x.new_empty(0).set_(x)  # type: ignore[call-overload, no-any-return]


class _Used(torch.autograd.Function):
    """The autograd function from a parameter's shard to the part that an operation uses."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, plan: RelayoutPlan, mesh: GridLike, deferred: Deferred | None
    ) -> Tensor:
        ctx.plan, ctx.mesh, ctx.deferred, ctx.shape = plan, mesh, deferred, x.shape
        result = moved(x, plan.steps, mesh, plan.name, "forward", plan.kind)
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        plan, mesh, deferred = ctx.plan, ctx.mesh, ctx.deferred
        refuse_batched(grad, plan.name)
        grad = grad.to_dense() if grad.is_sparse else grad
        late, sums = mesh.step.late, mesh.step.partial_sums
        late.enter()
        if torch.is_grad_enabled():  # create_graph=True: by itself, the other way, which has a gradient again
            return _Used.apply(grad, plan.back, mesh, None), None, None, None  # type: ignore[no-untyped-call]
        held = sums.holds_back and deferred is not None and deferred.accumulates(ctx.next_functions[0][0])
        way = way_of(grad, plan.back.steps, mesh, plan.name, "wgrad", plan.back.kind)
        leaf = None if deferred is None else deferred.leaf
        feed = mesh.step.residuals.feed(leaf, plan.name) if way.feeds_back else None
        move = Move(way, grad, hold=held, feed=feed).start()
        if deferred is None or not move.is_under_way:
            return move.wait(), None, None, None
        deferred.late = late.expect(move, deferred.leaf if held else None, sums)
        late.came_through([deferred.late], sums if held else None)
        return grad.new_zeros(()).expand(ctx.shape), None, None, None  # a placeholder that the arrival drops
