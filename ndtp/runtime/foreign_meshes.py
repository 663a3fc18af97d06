"""torch's own tools on parameters of a grid: the calls that are refused by name, and warnings that are dropped.

`fully_shard` over a dim of a user's mesh that is not on the grid is refused, with the way that works.

FSDP2 puts its mesh and that of a DTensor parameter together.  It takes two dims of a tensor-parallel mesh at most, none
of an order of its own, and reduces a gradient where its own hooks fire, which ndtp's late ones do not wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ndtp.collectives.torch_patches import replaced
from ndtp.errors import LayoutError


def refuse_joining() -> None:
    """Have torch's joining of meshes name the grids among them in its errors."""
    with suppress(AttributeError):  # a torch that joins no meshes
        replaced("torch.distributed.device_mesh.DeviceMesh._concatenate", _naming_grids)


def _naming_grids(joined: Callable[[list[Any]], object]) -> object:
    def named(meshes: list[Any]) -> Any:
        grids = [mesh for mesh in meshes if hasattr(mesh, "ndtp_grid")]
        if grids:
            others = [name for mesh in meshes if mesh not in grids for name in mesh.mesh_dim_names or ()]
            over = ", ".join(repr(name) for name in others) or "another mesh"
            raise LayoutError(
                f"fully_shard: parameters on the grid {grids[0].ndtp_grid} cannot be split once more over {over}\n"
                "  fix: make that dim an axis of the grid, ProcessGrid.from_mesh(mesh, axes={'z': ..., 'x': ...}): z "
                "splits weights as FSDP does (scheme='3d'), dp rows alone"
            )
        return joined(meshes)

    return staticmethod(named)


_GRID_DIMS: set[str] = set()


def spare_advice(names: Iterable[str]) -> None:
    """DTensor advises, on every rank, to flatten dims of a mesh.  Of a grid's nobody but ndtp could.

    `full_tensor()` and torch's own clipping take one collective an axis, which is exact.
    """
    _GRID_DIMS.update(f'"{name}"' for name in names)
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_not_about_a_grid)  # once: it is the same


def _is_not_about_a_grid(record: logging.LogRecord) -> bool:
    _, advice, dims = record.getMessage().partition("flatten mesh dimensions [")
    return not advice or not set(dims.partition("]")[0].split(", ")) <= _GRID_DIMS
