"""Sums over ranks that gradients of tensors outside of products need: of whole gradients, and of their norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.algebra.steps import Step

if TYPE_CHECKING:
    from ndtp.runtime.process_grid import ProcessGrid


@torch.no_grad()
def all_reduce(gradients: Iterable[tuple[str, Tensor]], mesh: ProcessGrid, axes: Sequence[str]) -> None:
    """Sum gradients over axes, in place; named, for meters, profiles and errors.

    All ranks give as many, of the same shapes, in one order.  A sparse one goes by torch itself, and is not counted.
    """
    step = Step("all_reduce", mesh.grid.nontrivial(axes))
    if not step.axes:
        return
    mesh.step.late.enter()
    for name, gradient in gradients:
        if gradient.is_sparse:  # of as many elements on each rank as it happens to have
            _sum_sparse(gradient, mesh.group(step.axes), mesh.groups.kind.sums_sparse)
            continue
        out = gradient if gradient.is_contiguous() else None
        summed = mesh.collectives.start(step, gradient, (name, "gradient"), "wgrad", out=out).wait()
        if summed is not gradient:
            gradient.copy_(summed.view_as(gradient))


def _sum_sparse(gradient: Tensor, group: dist.ProcessGroup, is_known: bool) -> None:
    """Sum a sparse gradient in place; as a dense one over a backend that does not know sparse tensors.

    It keeps the elements that any rank has, also those whose sum is zero, which an optimizer may update.
    """
    if is_known:
        dist.all_reduce(gradient, group=group)
        return
    found = gradient.coalesce()
    dense, has = found.to_dense(), found.values().new_zeros(found.shape[: found.sparse_dim()])
    has[tuple(found.indices())] = 1
    for x in (dense, has):
        dist.all_reduce(x, group=group)
    indices = has.nonzero().t()
    gradient.copy_(torch.sparse_coo_tensor(indices, dense[tuple(indices)], gradient.shape, is_coalesced=True))


def joined_norms(norms: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """Norms of vectors whose parts are on the ranks of `group`, which may be of any mesh."""
    if math.isinf(norm_type):
        # A maximum may lose a NaN, and on some ranks alone.
        sign = math.copysign(1.0, norm_type)
        is_nan = norms.isnan()
        found = torch.cat([torch.where(is_nan, -math.inf, norms * sign), is_nan.double()])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        largest, is_nan = found.chunk(2)
        return torch.where(is_nan > 0, math.nan, largest * sign)
    if norm_type == 0:
        dist.all_reduce(norms, group=group)
        return norms
    powers = norms**norm_type
    dist.all_reduce(powers, group=group)
    return powers ** (1 / norm_type)
