"""`reshard`: a tensor from any layout on any grid to any layout on any other grid of the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.resharding import ReshardPlan
from ndtp.collectives.cross_check import cross_check
from ndtp.collectives.uneven_exchange import cut, start_reshard
from ndtp.compute.torch_calls import AutogradContext
from ndtp.errors import GridError, LayoutError

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


def reshard(
    x: Tensor,
    source: Layout,
    target: Layout,
    mesh: GridLike,
    to: GridLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    name: str = "reshard",
) -> Tensor:
    """This rank's shard of a tensor as `target`, from its shard as `source`, with the least bytes.

        x        this rank's shard of X as `source`, a layout on the grid of `mesh`
        returns  its shard of X as `target`, a layout on the grid of `to`

    Any two layouts will do.  Every rank receives what it lacks of its new shard, each element once, and nothing else:
    what it holds already stays, replicas included.  Replicas share the sending.  One exchange over all ranks, or none
    where no rank lacks anything.  `ndtp.algebra.resharding.ReshardPlan` says who sends what to whom, and counts it.

    Differentiable: the gradient of a tensor lies as the tensor does, so it goes from `target` to `source`, and all
    replicas get the same full gradient.  It is linear, and can be differentiated as often as wanted.

    Args:
        to: another grid over the ranks of `mesh`, in any order.  Default: the same grid.
        shape: the global shape, where it does not follow from that of the shard: sizes need not divide, the blocks are
            then those of `Layout.slices(..., uneven=True)`, which are DTensor's.  Default: every rank's shard is as
            large as this one's.

    Raises:
        GridError: grids of other ranks.
        LayoutError: a layout of another grid, or a shard that is not as `source` says.
    """
    to = mesh if to is None else to
    for layout, grid in ((source, mesh.grid), (target, to.grid)):
        if layout.grid != grid:
            raise LayoutError(f"reshard '{name}': {layout} lies on grid {layout.grid}, the process grid is {grid}")
    if x.dim() != source.ndim:
        raise LayoutError(f"reshard '{name}': the shard has {x.dim()} dims, its layout {source} {source.ndim}")
    if shape is None:
        shape = tuple(size * source.num_splits(dim) for dim, size in enumerate(x.shape))
    return resharded(x, ReshardPlan(source, target, tuple(shape), target_ranks=seats_of(mesh, to), name=name), mesh, to)


def resharded(x: Tensor, plan: ReshardPlan, mesh: GridLike, to: GridLike) -> Tensor:
    """`x` by a plan between two process grids; see `reshard`, which makes the plan.

    Raises:
        LayoutError: a shard that is not as the plan says.
    """
    plan = known(plan)
    block = plan.held(plan.ids[mesh.rank])
    assert block is not None
    held = tuple(stop - start for start, stop in block)
    if tuple(x.shape) != held:
        raise LayoutError(
            f"reshard '{plan.name}': rank {mesh.rank} has a shard of shape {tuple(x.shape)}; of {plan.shape} as "
            f"{plan.source} it holds {held}\n  fix: pass shape=, the global shape, and this rank's shard of it"
        )
    return _Reshard.apply(x, plan, mesh, to, "forward")  # type: ignore[no-untyped-call, no-any-return]


def seats_of(mesh: GridLike, to: GridLike) -> tuple[int, ...] | None:
    """The rank on the first grid of every rank of the other; None if they are the same.

    Raises:
        GridError: grids of other ranks.
    """
    ours, theirs = mesh.global_ranks or [0], to.global_ranks or [0]
    if sorted(ours) != sorted(theirs):
        raise GridError(
            f"reshard: grid {mesh.grid} has the ranks {_some(ours)}, grid {to.grid} the ranks {_some(theirs)}\n"
            "  fix: two grids over the same ranks"
        )
    return None if ours == theirs else tuple(map(ours.index, theirs))


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{min(ranks)} to {max(ranks)} ({len(ranks)} of them)"


@lru_cache(maxsize=1024)
def known(plan: ReshardPlan) -> ReshardPlan:
    """Return the plan itself, from a cache, so that a plan that is used again knows its messages."""
    return plan


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, plan: ReshardPlan, mesh: GridLike, to: GridLike, phase: str) -> Tensor:
        ctx.arguments = plan, mesh, to
        mesh.step.late.enter()
        if mesh.check:  # shapes of shards may differ
            wants = " requires_grad" * x.requires_grad
            cross_check(mesh.groups, f"{plan.name} {plan}, {plan.shape} to {plan.end_shape}; {x.dtype}{wants}")
        if plan.is_local:
            return cut(x, plan, plan.ids[mesh.rank])
        return start_reshard(x, plan, mesh.collectives, phase).wait()

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, mesh, to = ctx.arguments
        # By itself, the other way: so a gradient of gradients is right, too.
        return _Reshard.apply(grad, known(plan.back), to, mesh, "dgrad"), None, None, None, None  # type: ignore[no-untyped-call]
