"""Sharded parameters: DTensors of the dense shape, of which a rank creates, draws and keeps its own shard only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.layout import Layout
from ndtp.compute.traces import refuse_traces
from ndtp.errors import LayoutError
from ndtp.nn.random import key_of, uniform
from ndtp.ops.products import relayout
from ndtp.runtime.arrival import is_plain, local_shard, real_of, stored_shape, wrapped
from ndtp.runtime.grid_parts import dense_of, full_of
from ndtp.runtime.halves import as_it_lies, laid_sizes
from ndtp.runtime.process_grid import ProcessGrid


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


def expressible(axes: Sequence[str], mesh: ProcessGrid) -> tuple[str, ...]:
    """The first of the axes that split a dim, as many as DTensor has in that order on the grid's mesh."""
    order = {axis: i for i, axis in enumerate(mesh.mesh_axes)}
    kept: list[str] = []
    for axis in axes:
        before = [order[other] for other in kept if other in order]
        if axis in order and before and order[axis] < before[-1]:
            break
        kept.append(axis)
    return tuple(kept)


def empty_parameter(
    shape: Sequence[int], layout: Layout, mesh: ProcessGrid, device: Device = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """An uninitialised parameter of the global `shape`, laid out as `layout`.

    Raises:
        LayoutError: a size that its axes do not divide.
    """
    device = mesh.device_type if device is None else device
    local = torch.empty(layout.shard_shape(shape), device=device, dtype=dtype)
    if mesh.device_mesh is None:
        return nn.Parameter(local)
    from ndtp.nn.optimizer_states import watch_states
    from ndtp.runtime.grid_tensor import parameter_of

    watch_states()
    return parameter_of(sharded(local, layout, mesh))


def put_in_place(dense: Tensor, placements: Any, device_mesh: Any, shape: Sequence[int], name: str) -> Tensor:
    """This rank's part of a tensor that every rank has, as one on the grid; differentiable.

    Raises:
        LayoutError: the tensor belongs to a transform of torch.func.
    """
    refuse_traces(name)
    from ndtp.runtime.grid_autograd import PutInPlace
    from ndtp.runtime.grid_tensor import GridTensor

    found = PutInPlace.apply(dense, placements, device_mesh, torch.Size(shape), GridTensor)  # type: ignore[no-untyped-call]
    return found  # type: ignore[no-any-return]


def moved_in_place(computed: Any, placements: tuple[Any, ...], shape: Sequence[int], name: str) -> Any:
    """A DTensor that was computed in the place of a parameter, to lie as that does; differentiable."""
    if tuple(stored_shape(computed)) != tuple(shape):
        return put_in_place(computed.full_tensor(), placements, computed.device_mesh, shape, name)
    if computed.requires_grad:
        computed.register_hook(_of_grid)
    return computed if computed.placements == placements else computed.redistribute(placements=placements)


def _of_grid(grad: Tensor) -> object:
    """Make a gradient one of the grid, for what computed the tensor: DTensor alone lacks rules for its backward."""
    from ndtp.runtime.grid_tensor import GridTensor

    return GridTensor(grad) if type(grad) is not GridTensor and not is_plain(grad) else None


def put_on_grid(
    dense: Tensor, layout: Layout, mesh: ProcessGrid, name: str, shape: Sequence[int] | None = None
) -> None:
    """Let a dense parameter become one of the grid, which is the same object; its gradient comes along.

    Args:
        shape: with padding.
    """
    stand_in(dense, like_dense(dense, layout, mesh, shape), layout, mesh, name)


def like_dense(dense: Tensor, layout: Layout, mesh: ProcessGrid, shape: Sequence[int] | None = None) -> nn.Parameter:
    """A parameter on the grid with the values of a dense one."""
    made = empty_parameter(tuple(shape or dense.shape), layout, mesh, dense.device, dense.dtype)
    if not dense.is_meta:
        fill_from_dense(made, layout, mesh, dense)
    return made


@torch.no_grad()
def stand_in(
    parameter: Any, made: Any, layout: Layout, mesh: ProcessGrid, name: str, real: Sequence[int] | None = None
) -> None:
    """Let a parameter become what `made` is, and stay the same object.

    Args:
        real: the shape without padding; default: that of the parameter.
    """
    real, grad = torch.Size(parameter.shape if real is None else real), parameter.grad
    if is_plain(made):
        parameter.grad = None
        parameter.data = made.detach() if made.dim() == len(real) else made.detach().flatten(1, 2)  # halves
    else:
        from ndtp.runtime.grid_tensor import become

        become(parameter, made, name, real)
    parameter.ndtp_layout, parameter.ndtp_real = layout, real
    if grad is not None:
        parameter.grad = shard_like(parameter, grad, mesh)


@torch.no_grad()
def shard_like(parameter: Any, dense: Tensor, mesh: ProcessGrid) -> Tensor:
    """A dense tensor, to lie as a parameter of that shape does which `stand_in` has put on the grid."""
    if is_plain(parameter):
        return dense.view(parameter.shape)
    dense = dense.detach().reshape(parameter.ndtp_real)
    own = wrapped(dense.new_empty(parameter._local_tensor.shape), parameter._spec, real_of(parameter))
    if not dense.is_meta:
        fill_from_dense(own, parameter.ndtp_layout, mesh, dense)
    return own


@torch.no_grad()
def fill_uniform(
    parameter: Tensor, layout: Layout, mesh: ProcessGrid, bound: float, real: Sequence[int], seed: int, name: str
) -> None:
    """Fill with U(-bound, bound), keyed by (seed, name, global index): the same global values on every grid.

    Args:
        real: the global shape without padding; what lies beyond is zero.
    """
    local = local_shard(parameter)
    parts = _real_part(layout, mesh, stored_shape(parameter), real)
    local.zero_()
    drawn = uniform(real, parts, key_of(seed, name), local.device)
    local[tuple(slice(0, part.stop - part.start) for part in parts)] = ((2 * drawn - 1) * bound).to(local.dtype)


@torch.no_grad()
def fill_normal(
    parameter: Tensor, layout: Layout, mesh: ProcessGrid, real: Sequence[int], seed: int, name: str
) -> None:
    """Fill with N(0, 1), keyed as `fill_uniform` is.

    Source: Box and Muller 1958, "A note on the generation of random normal deviates".
    """
    local = local_shard(parameter)
    parts = _real_part(layout, mesh, stored_shape(parameter), real)
    local.zero_()
    radius, angle = (uniform(real, parts, key_of(seed, f"{name}.{part}"), local.device) for part in ("radius", "angle"))
    drawn = (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)
    local[tuple(slice(0, part.stop - part.start) for part in parts)] = drawn.to(local.dtype)


def computed_in(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that hooks have computed in the place of parameters, as weight norms and pruning do.

    `copy.deepcopy` refuses such a tensor, which is no leaf of autograd's graph.
    """
    for part in module.modules():
        yield from (x for x in vars(part).values() if isinstance(x, Tensor) and x.grad_fn is not None)


@torch.no_grad()
def fill_from_dense(parameter: Tensor, layout: Layout, mesh: ProcessGrid, dense: Tensor) -> None:
    """Copy this rank's shard out of the dense tensor; what lies beyond it is zero."""
    local = local_shard(parameter)
    dense = as_it_lies(dense, layout.ndim)
    parts = _real_part(layout, mesh, stored_shape(parameter), dense.shape)
    local.zero_()
    local[tuple(slice(0, part.stop - part.start) for part in parts)] = dense[parts].to(local)


def taken(value: Tensor, own: Tensor, layout: Layout, mesh: ProcessGrid, real: Sequence[int]) -> Tensor:
    """Return the value of a state dict for the parameter `own`, as it is loaded: a dense tensor becomes this rank's
    shard.

    One that lies otherwise on the same ranks is gathered, a collective.  A plain tensor is dense, with the padding of
    `own` or without.  One of another shape is left to torch, which compares shapes.

    Args:
        real: the shape without padding.

    Raises:
        LayoutError: a DTensor on other ranks than `own`; padding that is not zero.
    """
    value = dense_of(value)
    lies, wanted = _lies(value), _lies(own)
    # A DTensor of a twin that lies otherwise, or a mean of several states.
    if not is_plain(value) and lies != wanted and (lies[0] == wanted[0] or all(p.is_replicate() for p in lies[1])):
        value = full_of(value)
    if not is_plain(value):
        if lies != wanted:
            raise LayoutError(
                f"a DTensor with placements {lies[1]} on {lies[0]}, this parameter has {wanted[1]} on {wanted[0]}\n"
                "  fix: redistribute it, or load its full_tensor()"
            )
        if value.shape == own.shape or stored_shape(value) != stored_shape(own):
            return value
        return wrapped(value._local_tensor, value._spec, real_of(own))  # type: ignore[attr-defined, no-any-return]
    shape = laid_sizes(stored_shape(own), layout.ndim)
    if tuple(value.shape) not in (shape, tuple(real)) or (mesh.device_mesh is None and tuple(value.shape) == shape):
        return value if value.dim() != layout.ndim or value.dim() == own.dim() else value.flatten(1, 2)
    dense = value.detach()[tuple(slice(0, size) for size in real)]
    if dense.shape != value.shape and not value.is_meta and value.count_nonzero() != dense.count_nonzero():
        raise LayoutError(
            f"a tensor of the padded shape {shape}, whose padding beyond {tuple(real)} is not zero: it is of a larger "
            "layer"
        )
    local = dense.new_zeros(layout.shard_shape(shape))
    parts = _real_part(layout, mesh, shape, real)
    local[tuple(slice(0, part.stop - part.start) for part in parts)] = dense[parts]
    if not is_plain(own):
        return wrapped(local, own._spec, real_of(own))  # type: ignore[attr-defined, no-any-return]
    made = sharded(local, layout, mesh)
    return made if made.dim() == own.dim() else made.flatten(1, 2)


def _lies(x: Any) -> tuple[Any, Any]:
    return ("one rank", "none") if is_plain(x) else (x.device_mesh, x.placements)


def check_own(parameter: Tensor, shape: Sequence[int], shard_shape: Sequence[int], x: Tensor, name: str) -> None:
    """Check that a module's parameter is still as the module made it: on a device like x's, and this rank's shard.

    How a DTensor lies is compared where it is used.

    Raises:
        LayoutError: names the parameter, and how to bring it in.
    """
    refuse_traces(name)
    if parameter.is_meta and not x.is_meta:
        raise LayoutError(
            f"{name} is on the meta device and has no values yet\n  fix: to_empty(device=...), then reset_parameters() "
            "or load_state_dict(); or load_state_dict(state, assign=True)"
        )
    is_shard = is_plain(parameter)
    if tuple(stored_shape(parameter)) != tuple(shard_shape if is_shard else shape):
        raise LayoutError(
            f"{name} is a {'plain tensor' if is_shard else 'DTensor'} of the shape {tuple(parameter.shape)}; of "
            f"{tuple(shape)} a rank has a shard of {tuple(shard_shape)}\n  fix: load_state_dict, which cuts the shard "
            "out of a dense tensor"
        )


@torch.no_grad()
def full(parameter: Tensor, layout: Layout, mesh: ProcessGrid, real: Sequence[int]) -> Tensor:
    """The dense tensor without padding, on every rank; a collective."""
    dense = relayout(local_shard(parameter), layout, layout.with_dims(*[None] * layout.ndim), mesh, "to_dense")
    return dense.detach()[tuple(slice(0, size) for size in real)].clone()


def _real_part(layout: Layout, mesh: ProcessGrid, shape: Sequence[int], real: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of this rank's shard of `shape`, cut to the tensor of shape `real` at its start."""
    return tuple(
        slice(min(part.start, size), min(part.stop, size))
        for part, size in zip(layout.slices(mesh.rank, shape), real, strict=True)
    )
