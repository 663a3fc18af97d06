"""`given_mesh`: what a user gives as `mesh`, as a `ProcessGrid`; or an error that says what was meant."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ndtp.algebra.grid import Grid
from ndtp.algebra.wire import Wire
from ndtp.errors import GridError
from ndtp.runtime.process_grid import ProcessGrid

GivenWire = Wire | str | Mapping[str, str | bool | None] | None


def given_mesh(mesh: Any, owner: str, makes: bool = False, wire: GivenWire = None) -> Any:
    """The `ProcessGrid` that was given, or that a `Grid` or a `DeviceMesh` with named dims stands for.

    Args:
        makes: whether one may be made here.  A module makes none: those of one model share theirs.
        wire: the dtypes in which tensors travel, instead of those of the grid, see `ProcessGrid.sending`.

    Raises:
        GridError: anything else; with what to write instead.
    """
    if isinstance(mesh, Grid):
        if makes:
            return ProcessGrid(mesh, wire=wire)
        said, fix = f"the Grid {mesh}", "make mesh = ndtp.ProcessGrid(grid) once, and give it to all modules"
    elif hasattr(mesh, "mesh_dim_names"):
        if makes and mesh.mesh_dim_names:
            return ProcessGrid.from_mesh(mesh, wire=wire)
        said = "a DeviceMesh" if mesh.mesh_dim_names else "a DeviceMesh without names of its dims"
        fix = "make mesh = ndtp.ProcessGrid.from_mesh(device_mesh) once, and give it to all modules"
        if not mesh.mesh_dim_names:
            fix = "init_device_mesh(..., mesh_dim_names=('y', 'x'))"
    elif hasattr(mesh, "grid"):
        return mesh if wire is None else mesh.sending(wire)
    else:
        said, fix = repr(mesh), "ndtp.ProcessGrid(ndtp.Grid(y=2, x=2)), whose sizes multiply to the number of ranks"
        sizes = mesh if isinstance(mesh, (tuple, list)) else (mesh,)
        if sizes and len(sizes) <= 3 and all(type(size) is int and size > 0 for size in sizes):
            # The first axis is the slowest, as the first dim of a DeviceMesh of these sizes would be.
            axes = ", ".join(f"{axis}={size}" for axis, size in zip("zyx"[-len(sizes) :], sizes, strict=True))
            fix = f"ndtp.ProcessGrid(ndtp.Grid({axes})), which names the axes"
        elif isinstance(mesh, str):
            fix += f"; a scheme goes by its name, scheme={mesh!r}"
    raise GridError(f"{owner}: mesh is {said}, no ProcessGrid\n  fix: {fix}")


def ranks_of_the_world() -> int:
    """Return the number of ranks where no mesh is given: those of torch.distributed, or this process alone.

    Raises:
        GridError: a launcher has started several, each of which would go on alone with the whole model.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    started = os.environ.get("WORLD_SIZE", "1")
    if started != "1":
        raise GridError(
            f"parallelize: no mesh is given, and torch.distributed does not know the {started} ranks that were "
            "started, by WORLD_SIZE\n  fix: torch.distributed.init_process_group() first"
        )
    return 1
