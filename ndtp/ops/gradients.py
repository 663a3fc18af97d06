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
            dist.all_reduce(gradient, group=mesh.group(step.axes))
            continue
        out = gradient if gradient.is_contiguous() else None
        summed = mesh.collectives.start(step, gradient, (name, "gradient"), "wgrad", out=out).wait()
        if summed is not gradient:
            gradient.copy_(summed.view_as(gradient))


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
