"""Things that a user puts in the place of a parameter on the grid: another parameter, or a tensor that is computed.

Weight norms, spectral norms, pruning and parametrizations take a parameter off a layer, and have it find a tensor
under its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.errors import LayoutError
from ndtp.nn.parameters import moved_in_place, put_in_place, put_on_grid
from ndtp.nn.sharded import Lies
from ndtp.runtime.arrival import is_plain, stored_shape
from ndtp.runtime.process_grid import ProcessGrid


def take_place(param: Any, lies: Lies, mesh: ProcessGrid, name: str) -> None:
    """A parameter that a user puts in the place of one on the grid.

    Raises:
        LayoutError: another shape, one that lies otherwise, as that of a layer with which it is to be tied, or one of a
            tensor class that only somebody else's code reads.
    """
    if is_plain(param) and type(param) is not nn.Parameter:
        raise LayoutError(
            f"ndtp: '{name}' {lies.dense} is split over ranks, and got a parameter of the class "
            f"{type(param).__name__}, which only its own code reads\n"
            "  fix: quantise before parallelize, which leaves such layers whole"
        )
    shape = tuple(param.shape)
    if is_plain(param) and shape == lies.dense and not param.is_meta and mesh.device_mesh is not None:
        put_on_grid(param, lies.layout, mesh, name, lies.shape)
    elif is_plain(param) and shape not in (lies.dense, lies.shard):
        raise LayoutError(
            f"ndtp: '{name}' is {lies.dense}, split over ranks, and got a parameter {shape}\n"
            "  fix: a dense parameter of its shape; or change the model before parallelize"
        )
    elif not is_plain(param) and (how := _how(param)) != (own := (*_placed(lies, mesh), lies.shape)):
        theirs = f"'{param.ndtp_name}'" if getattr(param, "ndtp_name", "") else "the other"
        raise LayoutError(
            f"ndtp: '{name}' got a parameter that lies as {how[:-1]} of {how[-1]} with padding, and its own lies as "
            f"{own[:-1]} of {own[-1]}: the two layers use {theirs} otherwise\n"
            "  fix: tie the weights before parallelize, which then lets both layers have one"
        )
    elif not is_plain(param) and not hasattr(param, "ndtp_layout"):  # made anew by load_state_dict(assign=True)
        param.ndtp_layout, param.ndtp_real = lies.layout, torch.Size(lies.dense)


def _placed(lies: Lies, mesh: ProcessGrid) -> tuple[object, ...]:
    return tuple(lies.layout.placements_on(mesh.mesh_axes))


def _how(param: Any) -> tuple[object, ...]:
    """The placements of a parameter on the grid, and its shape with padding."""
    return (*param.placements, tuple(stored_shape(param)))


def fits(value: Tensor, lies: Lies) -> bool:
    """Return whether a tensor has the sizes of a parameter, with padding or without, or those of its shard."""
    return tuple(value.shape) in (lies.dense, lies.real, lies.shape, lies.shard)


def of_other_sizes(value: Tensor, mesh: ProcessGrid) -> Lies:
    """Let every rank have the whole of a tensor that code put in the place of a parameter of other sizes.

    Such is a batch of weights of which each sample has its own.
    """
    sizes = tuple(value.shape)
    return Lies.of(Layout(mesh.grid, *[None] * len(sizes)), sizes, sizes)


def lying(value: Any, lies: Lies, mesh: ProcessGrid, name: str) -> Any:
    """Move a tensor that was computed in the place of a parameter to where that lies, differentiably.

    Raises:
        LayoutError: a tensor of other sizes.
    """
    sizes = tuple(value.shape)
    if mesh.device_mesh is None or (is_plain(value) and sizes == lies.shard != lies.real):
        return value
    if not fits(value, lies) or (is_plain(value) and sizes != lies.dense):
        layer, _, own = name.rpartition(".")
        raise LayoutError(
            f"ndtp: '{name}' is {lies.dense}, split over ranks, and a tensor {sizes} was put in its place for a "
            f"call of its layer\n  fix: a tensor of its sizes; or parallelize(..., keep=['{layer or own}']), which "
            "leaves the layer to its own code"
        )
    if is_plain(value):
        return put_in_place(value, lies.layout.placements_on(mesh.mesh_axes), mesh.device_mesh, lies.shape, name)
    return moved_in_place(value, _placed(lies, mesh), lies.shape, name)
