"""`recheck`: some products of a model or a grid are computed again by another rank."""

from __future__ import annotations

from torch import nn

from ndtp.errors import GridError
from ndtp.models.state_entries import mesh_of_model
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.runtime.recheck import Recheck, recheck_on


def recheck(model: nn.Module | ProcessGrid, fraction: float | None = None) -> Recheck | None:
    """Have a fraction of the products on a grid computed again by another rank, from the same operands.

        ndtp.recheck(model, 1 / 1000)       # or ndtp.parallelize(model, mesh, recheck=1 / 1000)

    A result that differs by more than rounding becomes a `CorruptionError` on all ranks, which names the rank that
    computed wrong, the module and the phase.  The products of layers, blocks and experts are looked at, forward and
    backward, and those that a split model's code makes of activations, forward.

    Args:
        model: what `parallelize` has split, a block, or the `ProcessGrid` of blocks.
        fraction: of all products, the same on all ranks; 0 looks at none.  Default: it stays as it is.

    Returns:
        What has been looked at so far, and what that took; None where nothing is looked at: also on one rank.

    Raises:
        GridError: a model that is on no grid, or a fraction that is none.
    """
    mesh = model if isinstance(model, ProcessGrid) else mesh_of_model(model)
    if mesh is None:
        raise GridError("recheck: the model is on no grid, so that no other rank can compute its products again")
    if fraction is not None:
        recheck_on(mesh.groups, mesh.step, fraction)
    return mesh.step.recheck


def rechecked(model: nn.Module, fraction: float, mesh: ProcessGrid | None = None) -> nn.Module:
    """Return the model, whose products are looked at from now on if the fraction is not 0.

    Args:
        mesh: on which it is, or will be when it is called first.
    """
    if fraction:
        recheck(mesh or model, fraction)
    return model
