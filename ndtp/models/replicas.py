"""Weights that several ranks hold drift apart where kernels do not repeat their sums to the bit.

Ranks that hold the same weight and the same rows compute its gradient each for itself, and send nothing.  On CPUs these
gradients are the same bits.  Kernels of GPUs that add up by atomics (`scatter_add`, `index_add`, the gradients of
embeddings) round otherwise in every run, and so the copies of a weight drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.collectives.in_line import real
from ndtp.collectives.labels import Label
from ndtp.collectives.watch import Watch
from ndtp.errors import warn
from ndtp.runtime.arrival import local_of

if TYPE_CHECKING:
    from ndtp.runtime.process_grid import ProcessGrid

# How far copies may be apart that rounding has moved, relative to the largest number of the weight, or to 1.  An
# optimizer that divides by the size of gradients, as Adam does, makes a step of its own of what is rounding alone.
FARTHEST = 1e-2


def may_drift(device_type: str) -> bool:
    """Return whether two ranks that compute the same may get other bits."""
    return device_type != "cpu" and not torch.are_deterministic_algorithms_enabled()


@torch.no_grad()
def brought_together(mesh: ProcessGrid, named: Sequence[tuple[str, Tensor]], axes: Sequence[Sequence[str]]) -> bool:
    """Give all ranks the first rank's copies of weights that are no farther apart than rounding; a collective.

    Args:
        named: all weights by their names.
        axes: those over which each is split; ranks along the others hold copies.

    Returns:
        False where some copies are farther apart; nothing was changed then.
    """
    copies: list[tuple[str, Tensor, Tensor]] = []
    for (name, weight), own in zip(named, axes, strict=True):
        across = mesh.grid.nontrivial([axis for axis in mesh.mesh_axes if axis not in own])
        mine = local_of(weight)
        if not across or not mine.numel():
            continue
        theirs = mine.detach().clone(memory_format=torch.contiguous_format)
        _first_of(theirs, mesh, across, name)
        copies.append((name, mine, theirs))
    if not copies:
        return False
    off = torch.stack([_apart(mine, theirs) for _, mine, theirs in copies])
    dist.all_reduce(off, dist.ReduceOp.MAX, group=mesh.group(mesh.grid.nontrivial(mesh.grid.names)))
    distances: list[float] = off.tolist()
    if not all(distance <= FARTHEST for distance in distances):
        return False
    for _, mine, theirs in copies:
        mine.copy_(theirs)
    apart = [name for (name, _, _), distance in zip(copies, distances, strict=True) if distance]
    if mesh.rank == 0 and apart:
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        warn(
            f"ndtp: ranks' copies of '{apart[0]}'{more} have drifted apart by up to {max(distances):.1e}, as they do "
            "by kernels without a fixed order of sums, or by other inputs; all go on with those of the first rank\n"
            "  fix: torch.use_deterministic_algorithms(True), with which copies stay the same to the bit"
        )
    return True


def _first_of(x: Tensor, mesh: ProcessGrid, axes: tuple[str, ...], name: str) -> None:
    """Let a tensor become that of the first rank along some axes."""
    group = mesh.group(axes)
    label = Label((name,), "weights", "broadcast", axes)
    with Watch(mesh.groups.describe, label, dist.get_process_group_ranks(group)):
        dist.broadcast(real(x), group=group, group_src=0)


def _apart(mine: Tensor, theirs: Tensor) -> Tensor:
    """The largest distance of two copies, relative to the largest number, or to 1; NaN where only one has a NaN."""
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    distance = torch.where(same, 0, (mine - theirs).abs()).max().double()
    finite = torch.where(theirs.isfinite(), theirs, 0)
    return distance / finite.abs().max().double().clamp(min=1.0)
