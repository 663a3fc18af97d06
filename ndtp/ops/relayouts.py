"""A tensor from one layout to another: checks, collectives and gradient, below the doors of eager and compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.steps import is_legal, relayout
from ndtp.errors import LayoutError
from ndtp.runtime.chain import signature_of
from ndtp.runtime.moves import Way

if TYPE_CHECKING:
    from ndtp.runtime.process_grid import ProcessGrid


def laid_out_anew(x: Tensor, source: Layout, target: Layout, mesh: ProcessGrid, name: str) -> Tensor:
    """See `ndtp.ops.products.relayout`."""
    relayout_checked(x, source, target, mesh, name)
    moved: Tensor = _Relayout.apply(x, source, target, mesh, name, "forward")  # type: ignore[no-untyped-call]
    return moved


def relayout_checked(x: Tensor, source: Layout, target: Layout, mesh: ProcessGrid | None, name: str) -> tuple[int, ...]:
    """The global shape of what is to be laid out anew; compared across ranks where `mesh` asks for it."""
    if mesh is not None and mesh.check:
        from ndtp.collectives.cross_check import cross_check

        cross_check(mesh.groups, f"relayout from {source} to {target}; {signature_of(x)}")
    if x.dim() != source.ndim or target.ndim != source.ndim:
        raise LayoutError(f"relayout '{name}': the shard has {x.dim()} dims, the layouts {source} and {target}")
    shape = tuple(int(size) * source.num_splits(dim) for dim, size in enumerate(x.shape))
    target.shard_shape(shape)
    if not is_legal(source.grid, source.dims, target.dims):
        raise LayoutError(
            f"relayout '{name}': from {source} to {target}, an axis that leaves or enters a dim is not its minor one\n"
            f"  fix: go through {source.with_dims(*((),) * source.ndim)}, the replicated layout"
        )
    return shape


def moved_to(x: Tensor, source: Layout, target: Layout, mesh: ProcessGrid, name: str, phase: str) -> Tensor:
    """This rank's shard in the other layout; `x` itself, or a part of it, where nothing is sent."""
    steps = relayout(mesh.grid, source.dims, target.dims)
    return Way(mesh.collectives, steps, (name,), phase, tuple(x.shape), x.dtype).start(x).wait()


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Layout, target: Layout, mesh: ProcessGrid, name: str, phase: str
    ) -> Tensor:
        ctx.arguments = (source, target, mesh, name)
        moved = moved_to(x, source, target, mesh, name, phase)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, target, mesh, name = ctx.arguments
        mesh.step.late.enter()
        # By itself, since it is linear: a relayout can be differentiated as often as wanted.
        return _Relayout.apply(grad, target, source, mesh, name, "dgrad"), None, None, None, None, None
