"""Sharded parameters: DTensors of the dense shape, of which a rank creates, draws and keeps its own shard only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.arrival import local_shard
from ndtp.layout import Layout
from ndtp.nn.random import key_of, uniform
from ndtp.ops import relayout
from ndtp.process_grid import ProcessGrid


def sharded(local: Tensor, layout: Layout, mesh: ProcessGrid) -> Tensor:
    """This rank's shard as a DTensor over the grid's mesh; on a grid of one rank, the tensor itself.

    Raises:
        LayoutError: an order of axes that the mesh cannot express.
    """
    if mesh.device_mesh is None:
        return local
    from torch.distributed.tensor import DTensor

    placements = layout.placements_on(mesh.mesh_axes)
    return DTensor.from_local(local, mesh.device_mesh, placements, run_check=False)


def empty_parameter(
    shape: Sequence[int], layout: Layout, mesh: ProcessGrid, device: Any = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """An uninitialised parameter of the global `shape`, laid out as `layout`.

    Raises:
        LayoutError: a size that its axes do not divide.
    """
    device = mesh.device_type if device is None else device
    local = torch.empty(layout.shard_shape(shape), device=device, dtype=dtype)
    return nn.Parameter(sharded(local, layout, mesh))


@torch.no_grad()
def fill_uniform(
    parameter: Tensor, layout: Layout, mesh: ProcessGrid, bound: float, real: Sequence[int], seed: int, name: str
) -> None:
    """Fill with U(-bound, bound), keyed by (seed, name, global index): the same global values on every grid.

    Args:
        real: the global shape without padding; what lies beyond is zero.
    """
    local = local_shard(parameter)
    parts = _real_part(layout, mesh, parameter.shape, real)
    local.zero_()
    drawn = uniform(real, parts, key_of(seed, name), local.device)
    local[tuple(slice(0, part.stop - part.start) for part in parts)] = ((2 * drawn - 1) * bound).to(local.dtype)


@torch.no_grad()
def fill_from_dense(parameter: Tensor, layout: Layout, mesh: ProcessGrid, dense: Tensor) -> None:
    """Copy this rank's shard out of the dense tensor; what lies beyond it is zero."""
    local = local_shard(parameter)
    parts = _real_part(layout, mesh, parameter.shape, dense.shape)
    local.zero_()
    local[tuple(slice(0, part.stop - part.start) for part in parts)] = dense[parts].to(local)


@torch.no_grad()
def full(parameter: Tensor, layout: Layout, mesh: ProcessGrid, real: Sequence[int]) -> Tensor:
    """The dense tensor without padding, on every rank; a collective."""
    dense = relayout(local_shard(parameter), layout, layout.with_dims(*[None] * layout.ndim), mesh, "to_dense")
    return dense.detach()[tuple(slice(0, size) for size in real)].clone()


def _real_part(layout: Layout, mesh: ProcessGrid, shape: Sequence[int], real: Sequence[int]) -> tuple[slice, ...]:
    """Where this rank's shard of `shape` lies, cut to the tensor of the shape `real` at its start."""
    return tuple(
        slice(min(part.start, size), min(part.stop, size))
        for part, size in zip(layout.slices(mesh.rank, shape), real, strict=True)
    )
