"""`ndtp.checkpoint.transfer`: a training run from a model on one grid to its twin on another, without a file.

Every tensor goes by a `ReshardPlan` between the two layouts: a rank receives what it lacks of its new shard, each
element once, and no padding.  What an optimizer keeps for a parameter goes the way of the parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.types import Device

from ndtp.algebra.layout import Layout
from ndtp.algebra.resharding import ReshardPlan
from ndtp.algebra.volume import Traffic, Volume
from ndtp.checkpoints.from_meta import materialise
from ndtp.checkpoints.optimizer_state import START, Kept, fresh_state, kept_by, restore_groups
from ndtp.checkpoints.parts import Laid
from ndtp.checkpoints.pieces import whole_of
from ndtp.collectives.handles import Handle
from ndtp.collectives.uneven_exchange import cut, start_reshard
from ndtp.errors import CheckpointError
from ndtp.models.state_entries import Entry, entries_of, mesh_of_model, tensors_of
from ndtp.ops.resharding import known, seats_of
from ndtp.runtime.crew import Crew, crew_of, failure_of
from ndtp.runtime.process_grid import ProcessGrid

PHASE = "transfer"
AT_ONCE = 2**28  # bytes that a rank has under way


DIFFERENT = "transfer: ranks have different models; nothing was changed\n  fix: the same pair of models on every rank"


def transfer(
    model: nn.Module,
    optimizer: Optimizer | None,
    to: nn.Module,
    to_optimizer: Optimizer | None = None,
    *,
    device: Device = None,
) -> Volume:
    """Give a model on another grid the weights of this one, and its optimizer what this one's keeps.

    A collective of all ranks, which both grids have, in any order.  The two are the same dense model; of tied
    parameters each may have some.  Padding stays where it is.  Values are cast to the dtypes of `to`, before they are
    sent where that is less.  What `to` has on the meta device gets memory first.

    Args:
        optimizer, to_optimizer: both or none.  Settings of groups come along, but for how it runs (`foreach`, `fused`).
        device: for what was on the meta device; default: that of the grid.

    Returns:
        What this rank received, in bytes: as `transfer_volume` says.

    Raises:
        CheckpointError: models of other keys or shapes, an optimizer of other parameters; names the key.  The same on
            every rank, and nothing is changed.
        GridError: grids of other ranks.
    """
    route = _Route.of(model, to)
    ways: list[_Way] = []
    kept, fresh = Kept(), Kept()

    def look() -> None:
        nonlocal kept, fresh
        if (optimizer is None) != (to_optimizer is None):
            raise CheckpointError("one model has an optimizer, the other none\n  fix: give both, or neither")
        ways.extend(route.ways(model, to))
        if optimizer is not None and to_optimizer is not None:
            kept, fresh = _states(model, optimizer, to, to_optimizer)

    route.crew.agree(failure_of(look), "transfer: {}; nothing was changed")
    if materialise(to, device):
        ways = route.ways(model, to)
        for entry in entries_of(to, route.mesh_of_target):
            if entry.stored != entry.real:
                entry.local.zero_()
    for key, mine in fresh.parts.items():
        theirs = kept.parts[key].entry
        if mine.entry.keys:
            ways.append(route.way(key, theirs, mine.entry))
        else:
            mine.entry.local.copy_(theirs.local)
    said = "\n".join(f"{way.name} {way.plan} {way.plan.shape} {way.dtype}" for way in ways)
    if route.crew.differing(said):
        raise CheckpointError(DIFFERENT)
    with torch.no_grad():
        _run(ways, route)
    if to_optimizer is not None:
        to_optimizer.state.clear()
        to_optimizer.state.update(fresh.states)
        restore_groups(to_optimizer, fresh.names, kept.groups or [])
    return Volume.of(way.volume(route.me) for way in ways)


def _states(model: nn.Module, optimizer: Optimizer, to: nn.Module, to_optimizer: Optimizer) -> tuple[Kept, Kept]:
    """Return what an optimizer keeps, and room for it on the grid of another one."""
    if any(parameter.is_meta for group in to_optimizer.param_groups for parameter in group["params"]):
        raise CheckpointError(
            "the optimizer that takes has parameters on the meta device, which others take the place of\n"
            "  fix: ndtp.checkpoint.initialize(to) before the optimizer is made"
        )
    (kept,) = kept_by(optimizer, whole_of(model).pieces)
    whole = whole_of(to)
    whole.meet("transfer")
    run = {"groups": kept.groups, "values": kept.values, "optimizer": type(optimizer).__name__}
    described = {key: Laid(part.dtype, part.shape) for key, part in kept.parts.items()}
    for entry in (entry for piece in whole_of(model).pieces for entry in piece.entries()):
        described |= {f"model.{key}": Laid(entry.local.dtype, entry.dense) for key in entry.keys}
    (fresh,) = fresh_state(to_optimizer, whole, described, run, Path("transfer"))
    return kept, fresh


def transfer_volume(model: nn.Module, optimizer: Optimizer | None, to: nn.Module) -> Volume:
    """Return the bytes that this rank would receive. `to` may be on the meta device.

    Raises:
        CheckpointError, GridError: as `transfer`.
    """
    route = _Route.of(model, to)
    ways = {way.name.removeprefix("model."): way for way in route.ways(model, to)}
    found = [way.volume(route.me) for way in ways.values()]
    if optimizer is not None:
        (kept,) = kept_by(optimizer, whole_of(model).pieces)
        for key, theirs in kept.parts.items():
            name = key.removeprefix(START).rpartition(".")[0]
            if theirs.entry.keys and name in ways:
                way = ways[name]
                found.append(way.volume(route.me, None if theirs.dtype == way.source.dtype else theirs.dtype))
    return Volume.of(found)


@dataclass(frozen=True)
class _Way:
    """One tensor: its plan, the shard that there is, the shard to be filled."""

    name: str
    plan: ReshardPlan
    source: Tensor
    target: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which the tensor is sent."""
        return min((self.source.dtype, self.target.dtype), key=lambda dtype: dtype.itemsize)

    def volume(self, rank: int, dtype: torch.dtype | None = None) -> Traffic:
        return self.plan.traffic(PHASE, "all_to_all", rank, self.dtype if dtype is None else dtype)


@dataclass(frozen=True)
class _Route:
    """The route from a grid to another over the same ranks; a model on no grid is whole on every rank.

    Attributes:
        mesh, other: of the source and of the target.
        seats: the rank on the first of every rank of the other.
    """

    mesh_of_source: ProcessGrid | None
    mesh_of_target: ProcessGrid | None
    mesh: ProcessGrid
    other: ProcessGrid
    seats: tuple[int, ...] | None

    @classmethod
    def of(cls, model: nn.Module, to: nn.Module) -> _Route:
        meshes = mesh_of_model(model), mesh_of_model(to)
        mesh, other = meshes[0] or meshes[1], meshes[1] or meshes[0]
        if mesh is None or other is None:
            raise CheckpointError("transfer: neither model is on a grid\n  fix: to.load_state_dict(model.state_dict())")
        return cls(*meshes, mesh, other, seats_of(mesh, other))

    @property
    def me(self) -> int:
        return self.mesh.rank

    @property
    def crew(self) -> Crew:
        return crew_of(self.mesh)

    def ways(self, model: nn.Module, to: nn.Module) -> list[_Way]:
        """Return the way of every tensor of the state dict of `to`."""
        theirs = {key: entry for entry in entries_of(model, self.mesh_of_source) for key in entry.keys}
        mine = entries_of(to, self.mesh_of_target)
        own = {_store(x) for x in tensors_of(to)}
        found, taken = [], set()
        for entry in mine:
            key = next((key for key in entry.keys if key in theirs), None)
            if key is None:
                raise CheckpointError(f"'{entry.keys[0]}' is a key of the model that takes, not of the other")
            taken |= {*entry.keys, *theirs[key].keys}
            if _store(entry.local) not in own:
                raise CheckpointError(f"'{key}' is no tensor of its own in the model that takes")
            found.append(self.way(f"model.{entry.keys[0]}", theirs[key], entry))
        foreign = [key for key in theirs if key not in taken]
        if foreign:
            raise CheckpointError(f"'{foreign[0]}' is a key of the model that gives, not of the other")
        return found

    def way(self, name: str, theirs: Entry, mine: Entry) -> _Way:
        if theirs.local.is_meta:
            raise CheckpointError(f"'{name}' is on the meta device, and has no values")
        if theirs.dense != mine.dense or theirs.local.is_floating_point() != mine.local.is_floating_point():
            raise CheckpointError(
                f"'{name}' is {theirs.dense} of {theirs.local.dtype} in the model that gives, and {mine.dense} of "
                f"{mine.local.dtype} in the one that takes"
            )
        if theirs.real != mine.real:  # gates and ups of experts as one dim, where these are whole
            theirs, mine = (
                (_seen_as(theirs, mine.real), mine) if _is_whole(theirs) else (theirs, _seen_as(mine, theirs.real))
            )
        source, target = (
            entry.layout or Layout(grid.grid, *[None] * len(entry.real))
            for entry, grid in ((theirs, self.mesh), (mine, self.other))
        )
        # Layers that are alike have one plan, which finds its messages once, however often a run goes this way.
        plan = known(
            ReshardPlan(source, target, theirs.stored, mine.stored, target_ranks=self.seats, name=PHASE, end=mine.real)
        )
        shards = (
            entry.local[tuple(slice(0, part.stop - part.start) for part in entry.part(grid.rank))]
            for entry, grid in ((theirs, self.mesh), (mine, self.other))
        )
        return _Way(name, plan, *shards)


def _is_whole(entry: Entry) -> bool:
    return entry.layout is None or tuple(entry.local.shape) == entry.dense


def _seen_as(entry: Entry, real: tuple[int, ...]) -> Entry:
    """Return an entry that is whole on every rank, in another shape of the same elements."""
    layout = None if entry.layout is None else Layout(entry.layout.grid, *[None] * len(real))
    return entry._replace(local=entry.local.view(real), layout=layout, stored=real, real=real)


def _run(ways: list[_Way], route: _Route) -> None:
    """Several tensors are under way at a time."""
    started: list[tuple[_Way, Handle]] = []
    route.mesh.step.late.enter()
    under_way = 0
    for way in ways:
        x = way.source.to(way.dtype)
        if way.plan.is_local:
            way.target.copy_(cut(x, way.plan, route.me))
            continue
        started.append((way, start_reshard(x, way.plan, route.mesh.collectives, PHASE)))
        under_way += _bytes(way)
        while under_way > AT_ONCE:
            under_way -= _landed(*started.pop(0))
    for each in started:
        _landed(*each)


def _landed(way: _Way, handle: Handle) -> int:
    way.target.copy_(handle.wait())
    return _bytes(way)


def _bytes(way: _Way) -> int:
    """The most that it may take on any rank: the same everywhere, for all ranks to wait for the same."""
    return math.prod(way.plan.target.shard_shape(way.plan.end_shape)) * way.dtype.itemsize


def _store(x: Tensor) -> int:
    local = getattr(x, "_local_tensor", x)
    return int(local.untyped_storage()._cdata)
