"""The exchange of a `ReshardPlan`: parts of a tensor, of any sizes, from every rank to those that lack them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ndtp.algebra.resharding import Box, ReshardPlan, volume_of
from ndtp.algebra.steps import Step
from ndtp.collectives.handles import Handle, Route, Started
from ndtp.collectives.labels import Label

if TYPE_CHECKING:
    from ndtp.collectives.collectives import Collectives

_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # which process groups do not take


def start_reshard(x: Tensor, plan: ReshardPlan, collectives: Collectives, phase: str) -> Handle:
    """Launch the exchange of all ranks of a grid; `wait` gives this rank's new shard.

    Args:
        x: this rank's shard, as `plan.held` says.
        plan: between two grids of the same ranks.
        collectives: of the grid of `plan.source`.
    """
    groups = collectives.groups
    me = plan.ids[groups.rank]
    step = Step("all_to_all", plan.axes)
    group = groups.group(step.axes, "scatter")
    op = (plan.name,)
    channel = collectives.channel(group, Label(op, phase, step.kind, step.axes), x.dtype)
    route = Route(step, op, phase, "", channel)
    mine, wanted, kept = plan.held(me), plan.wanted(me), plan.kept(me)
    assert mine is not None and wanted is not None
    sends, receives = plan.sends(me), plan.receives(me)
    route.shape = tuple(stop - start for start, stop in wanted)
    route.received = plan.received(me)
    places = {name: rank for rank, name in enumerate(plan.ids)}
    arriving = route.received + (0 if kept is None else volume_of(kept))
    made = torch.empty if arriving == volume_of(wanted) else torch.zeros

    def begin(x: Tensor, out: Tensor | None) -> Started:
        assert out is None
        result = made(route.shape, dtype=x.dtype, device=x.device)
        empty = x.new_empty(0)
        parts, landings = [empty] * len(places), [empty] * len(places)
        for message in sends:
            parts[places[message.receiver]] = part_of(x.detach(), message.box, mine)
        late = []
        for message in receives:
            room, landing = landing_in(result, message.box, wanted)
            landings[places[message.sender]] = landing
            if landing is not room:
                late.append((room, landing))
        work = collectives.exchange_parts(list(map(sendable, landings)), list(map(sendable, parts)), channel)
        if kept is not None:
            result[slices_of(kept, wanted)].copy_(x.detach()[slices_of(kept, mine)])

        def finish() -> Tensor:
            for room, landing in late:
                room.copy_(landing)
            return result

        return work, finish, (*parts, *landings), ()

    route.begin = begin
    return collectives.launch(route, x)


def cut(x: Tensor, plan: ReshardPlan, rank: int) -> Tensor:
    """This rank's new shard where nothing moves; a tensor of its own."""
    mine, wanted, kept = plan.held(rank), plan.wanted(rank), plan.kept(rank)
    assert mine is not None and wanted is not None
    if kept is not None and kept == wanted:
        return x[slices_of(kept, mine)].clone(memory_format=torch.contiguous_format)
    result = x.new_zeros([stop - start for start, stop in wanted])
    if kept is not None:
        result[slices_of(kept, wanted)] = x[slices_of(kept, mine)]
    return result


def part_of(x: Tensor, box: Box, mine: Box) -> Tensor:
    """Return the part of x that a rank whose block is `mine` sends: a view where its memory is in one piece."""
    return x[slices_of(box, mine)].contiguous()


def landing_in(result: Tensor, box: Box, wanted: Box) -> tuple[Tensor, Tensor]:
    """Return the place of a part in the block `wanted`, and the memory where it arrives: that place if it is
    contiguous.
    """
    room = result[slices_of(box, wanted)]
    return room, room if room.is_contiguous() else torch.empty_like(room, memory_format=torch.contiguous_format)


def slices_of(box: Box, frame: Box) -> tuple[slice, ...]:
    return tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(box, frame, strict=True))


def sendable(x: Tensor) -> Tensor:
    """Return the same memory in a dtype that process groups take."""
    if x.is_complex():
        return torch.view_as_real(x)
    return x.view(torch.uint8) if x.dtype in _BYTES else x
