"""Einsums, operations on elements and extremes of shards: a plan's ways there, what one rank computes, its way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.algebra.einsum import EinsumPlan, ExtremePlan
from ndtp.algebra.einsum_products import ProductForm
from ndtp.algebra.steps import Step
from ndtp.compute.norms import wide
from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import refuse_second
from ndtp.errors import LayoutError
from ndtp.ops.moving import enter, moved
from ndtp.ops.products import matmul
from ndtp.ops.reductions import merged, reduce

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


def contracted(
    plan: EinsumPlan, shards: Sequence[Tensor], mesh: GridLike, product: ProductForm | None = None
) -> Tensor:
    """This rank's shard of C, from its shards of the operands.

        forward   C  = move_C( einsum( move_A(A), move_B(B) ) )
        backward  dA = back_A( einsum( back_C(dC), move_B(B) ) ), and so for every operand

    `plan.ways` are the moves; each way back is the same relayout turned around.  Gathered operands are kept.

    Args:
        product: the product of matrices that it is, if it is one, which makes the same moves, and overlaps them.

    Raises:
        LayoutError: operands of different dtypes.
    """
    if len({shard.dtype for shard in shards}) > 1:
        texts = [f"{name} is {shard.dtype}" for name, shard in zip(plan.operand_names, shards, strict=True)]
        raise LayoutError(f"{plan.where}: {', '.join(texts)}\n  fix: cast them to one dtype (astype)")
    if product is not None:
        return _multiplied(plan, product, shards, mesh)
    held, phases = _held(plan, shards, mesh)
    return reduce(_local(plan, held), plan.ways["C"], mesh, phases["C"])


def applied(plan: EinsumPlan, function: Callable[..., Tensor], shards: Sequence[Tensor], mesh: GridLike) -> Tensor:
    """This rank's shard of a function of elements that share their letters; C has every letter.

    Raises:
        LayoutError: a function that gives another shape than that of its operands together.
    """
    held, _ = _held(plan, shards, mesh)
    aligned = []
    for name, tensor in zip(plan.operand_names, held, strict=True):
        letters = plan.stored[name].letters
        there = [letter for letter in plan.result if letter in letters]
        order = [letters.index(letter) for letter in there]
        units = [dim for dim, letter in enumerate(letters) if letter is None]
        tensor = tensor.permute((*order, *units))
        sizes = iter(tensor.shape)
        aligned.append(tensor.reshape([next(sizes) if letter in there else 1 for letter in plan.result]))
    result = function(*aligned)
    wanted = plan.held_shape(plan.result, plan.sizes)
    if tuple(result.shape) != wanted:
        raise LayoutError(
            f"{plan.where}: it gives {tuple(result.shape)} for shards of {wanted}\n"
            "  fix: a function of each element by itself, which is the same on shards as on the whole"
        )
    return result


def extreme(x: Tensor, plan: ExtremePlan, mesh: GridLike, largest: bool) -> Tensor:
    """The largest or smallest elements, the same on every rank along the axes of what is reduced.

    Elements that share an extreme share its gradient, as of `torch.amax`.
    """
    enter(mesh, plan.plan, x)
    result: Tensor = _Extreme.apply(x, plan, mesh, largest)  # type: ignore[no-untyped-call]
    return result


def _held(plan: EinsumPlan, shards: Sequence[Tensor], mesh: GridLike) -> tuple[list[Tensor], dict[str, str]]:
    """The operands where they are multiplied, and the phases of their gradients."""
    phases = plan.phases([torch.is_grad_enabled() and shard.requires_grad for shard in shards])
    named = zip(plan.operand_names, shards, strict=True)
    return [reduce(shard, plan.ways[name], mesh, phases[name]) for name, shard in named], phases


def _multiplied(plan: EinsumPlan, form: ProductForm, shards: Sequence[Tensor], mesh: GridLike) -> Tensor:
    """Compute a loop nest as a product of matrices: dims are permuted and merged before it, and C's are split after
    it.
    """
    given = []
    for name, groups, shard in zip("AB", (form.a, form.b), shards, strict=True):
        letters = plan.stored[name].letters
        ordered = shard.permute([letters.index(letter) for group in groups for letter in group])
        sizes = iter(ordered.shape)
        given.append(ordered.reshape([prod(next(sizes) for _ in group) for group in groups]))
    c = matmul(given[0], given[1], form.plan, mesh)
    held = [letter for group in form.c for letter in group]
    local = dict(zip(plan.result, plan.shard_shape("C", plan.sizes), strict=True))
    return c.reshape([local[letter] for letter in held]).permute([held.index(letter) for letter in plan.result])


def _local(plan: EinsumPlan, held: Sequence[Tensor]) -> Tensor:
    """torch's, of one rank: it has numbers for letters, and dims of size 1 that are broadcast have none."""
    numbers = {letter: i for i, letter in enumerate(plan.sizes)}
    arguments: list[Any] = []
    for name, tensor in zip(plan.operand_names, held, strict=True):
        letters = plan.stored[name].letters
        units = tuple(dim for dim, letter in enumerate(letters) if letter is None)
        arguments += [tensor.squeeze(units) if units else tensor, [numbers[letter] for letter in letters if letter]]
    return torch.einsum(*arguments, [numbers[letter] for letter in plan.result])


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, plan: ExtremePlan, mesh: GridLike, largest: bool) -> Tensor:
        of = torch.amax if largest else torch.amin
        own = of(x, plan.dims, keepdim=True)
        found = merged(own.reshape(1, -1), plan.merge, lambda each: of(each, 0), mesh, plan.plan.name).view_as(own)
        ctx.save_for_backward(x, found)
        ctx.plan, ctx.mesh = plan, mesh
        # The order of the letters in C is that of a permutation of what is left.
        left = [letter for letter in plan.plan.stored["A"].letters if letter in plan.plan.result]
        ctx.order = [left.index(letter) for letter in plan.plan.result]
        return found.squeeze(plan.dims).permute(ctx.order)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, found = ctx.saved_tensors
        plan, mesh = ctx.plan, ctx.mesh
        mesh.step.late.enter()
        refuse_second(plan.plan.name)
        share = (x == found).to(wide(x.dtype))
        count = share.sum(plan.dims, keepdim=True)
        if plan.merge.axes:
            count = moved(count, (Step("all_reduce", plan.merge.axes),), mesh, plan.plan.name, "dgrad")
        back = [ctx.order.index(dim) for dim in range(len(ctx.order))]
        whole = grad.permute(back).reshape(found.shape)
        return (share * (whole / count)).to(x.dtype), None, None, None
