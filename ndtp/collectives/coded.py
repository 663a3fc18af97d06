"""Collectives whose tensors travel by a `Codec`: gathers of what is quantised at its owner, sums of what is widened."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ndtp.algebra.wire import part_of

if TYPE_CHECKING:
    from ndtp.algebra.steps import Step
    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.buffer_ring import BufferRing
    from ndtp.collectives.codecs import Codec
    from ndtp.collectives.handles import Begin, Channel, Route, Shape, Started, Underway


class Sender(Protocol):
    """The part of `Collectives` that a coded collective uses."""

    groups: AxisGroups
    ring: BufferRing

    def make_room(self, route: Route, num_bytes: int) -> None: ...

    def _gather(self, landing: Tensor, x: Tensor, to: Channel) -> Underway | None: ...

    def _exchange(self, landing: Tensor, blocks: Tensor, to: Channel) -> Underway | None: ...


def coded_routes(
    owner: Sender, codec: Codec, step: Step, bare: Sequence[Route], shape: Shape, blocks: bool
) -> tuple[Route, ...]:
    """Return the routes that go by a codec: one, or for an all-reduce the sum and the gather of it.

    Args:
        bare: two routes that are bound but for `begin`.
        shape: of what is sent, see `Collectives.routes`.
    """
    route, follower = bare
    ranks, dim = owner.groups.grid.size(step.axes), step.dim or 0
    route.codec = codec
    is_stacked = blocks and step.kind == "reduce_scatter"
    part, received = part_of(owner.groups.grid, step, (shape[1], shape[0] * shape[2]) if is_stacked else shape)
    route.coded_bytes = received * codec.num_bytes(part)
    if step.kind == "all_gather":
        route.begin = _gather(owner, route, codec, ranks, shape, dim, blocks)
    elif step.kind == "reduce_scatter":
        route.begin = _reduce(owner, route, codec, ranks, part, None if blocks else dim)
        route.rounded = partial(_rounded, codec, ranks, part, None if blocks else dim)
    elif step.kind == "all_to_all":
        route.begin = _exchange(owner, route, codec, ranks, part, dim, step.source or 0)
    else:
        route.begin, route.shape = _reduce(owner, route, codec, ranks, part, 0, pads=True), part
        route.rounded = partial(_rounded, codec, ranks, part, 0, pads=True)
        follower.begin = _gather(owner, follower, codec, ranks, part, 0, False, whole=shape)
        follower.codec, follower.follows, follower.coded_bytes = codec, True, 0
        follower.rounded = partial(_rounded, codec, 1, part, 0)
    owner.make_room(route, ranks * max(codec.num_bytes(shape), codec.num_bytes(route.shape)))
    return (route, follower) if follower.follows else (route,)


def _memory(owner: Sender, num_bytes: int, like: Tensor) -> Tensor:
    return owner.ring.borrow((num_bytes,), like.new_empty(0, dtype=torch.uint8))


def _gather(
    owner: Sender,
    route: Route,
    codec: Codec,
    ranks: int,
    part: Shape,
    dim: int,
    blocks: bool,
    whole: Shape | None = None,
) -> Begin:
    """Begin what `Collectives._all_gather` begins, by a codec.

    Args:
        whole: the shape of the result, where rows of padding behind it are dropped.
    """
    length = codec.num_bytes(part)

    def begin(x: Tensor, out: Tensor | None) -> Started:
        sent, landing = _memory(owner, length, x), _memory(owner, ranks * length, x)
        codec.encode(x, sent)
        dtype, device = x.dtype, x.device

        def finish() -> Tensor:
            if route.keeps_code and out is None:
                came = codec.as_it_came(landing.view(ranks, length), part, dtype)
                return came if blocks else came.joined()
            shape = route.shape if whole is None else (whole or (1,))
            result = torch.empty(shape, dtype=dtype, device=device) if out is None else out.view(shape)
            for j, bytes_of_it in enumerate(landing.view(ranks, length)):
                found = codec.decode(bytes_of_it, part, dtype)
                if blocks:
                    result[j].copy_(found)
                    continue
                start = j * part[dim]
                count = max(0, min(part[dim], shape[dim] - start))
                result.narrow(dim, min(start, shape[dim]), count).copy_(found.narrow(dim, 0, count))
            return result if whole is None else result.view(whole)

        return owner._gather(landing, sent, route.channel), finish, (sent, landing), (sent, landing)

    return begin


def _parts(x: Tensor, ranks: int, part: Shape, dim: int | None, pads: bool = False) -> Tensor:
    """Return the parts of a tensor for each rank: [ranks, *part]."""
    if pads:
        x = x.reshape(-1) if not x.dim() else x
        missing = ranks * part[0] - x.shape[0]
        x = torch.cat([x, x.new_zeros(missing, *part[1:])]) if missing else x
    return x if dim is None else x.unflatten(dim, (ranks, part[dim])).movedim(dim, 0)


def _rounded(codec: Codec, ranks: int, part: Shape, dim: int | None, x: Tensor, pads: bool = False) -> Tensor:
    """Return what the receivers find of a tensor that is sent to them in parts."""
    found = []
    for mine in _parts(x.detach(), ranks, part, dim, pads):
        sent = x.new_empty(codec.num_bytes(part), dtype=torch.uint8)
        codec.encode(mine, sent)
        found.append(codec.decode(sent, part, x.dtype))
    if dim is None:
        return torch.stack(found)
    result = torch.cat(found, dim)
    return result[: x.shape[0]] if pads and x.dim() else result.view(-1)[: x.numel()].view(x.shape) if pads else result


def _reduce(
    owner: Sender, route: Route, codec: Codec, ranks: int, part: Shape, dim: int | None, pads: bool = False
) -> Begin:
    """Begin what `Collectives._reduce_scatter` begins, by an exchange of parts in a codec.

    Args:
        dim: which is scattered; None: what is sent lies as blocks.
        pads: whether rows may be missing to make equal parts.
    """
    length = codec.num_bytes(part)

    def begin(x: Tensor, out: Tensor | None) -> Started:
        sent, landing = _memory(owner, ranks * length, x), _memory(owner, ranks * length, x)
        for mine, bytes_of_it in zip(_parts(x.detach(), ranks, part, dim, pads), sent.view(ranks, length), strict=True):
            codec.encode(mine, bytes_of_it)
        dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)

        def finish() -> Tensor:
            first, *others = (codec.decode(each, part, wide) for each in landing.view(ranks, length))
            for other in others:
                first += other
            return first.to(dtype) if out is None else out.copy_(first)

        return owner._exchange(landing, sent, route.channel), finish, (sent, landing), (sent, landing)

    return begin


def _exchange(owner: Sender, route: Route, codec: Codec, ranks: int, part: Shape, dim: int, source: int) -> Begin:
    """Begin what `Collectives._all_to_all` begins, by a codec."""
    length = codec.num_bytes(part)

    def begin(x: Tensor, out: Tensor | None) -> Started:
        sent, landing = _memory(owner, ranks * length, x), _memory(owner, ranks * length, x)
        for mine, bytes_of_it in zip(_parts(x.detach(), ranks, part, dim), sent.view(ranks, length), strict=True):
            codec.encode(mine, bytes_of_it)
        dtype, device = x.dtype, x.device

        def finish() -> Tensor:
            result = torch.empty(route.shape, dtype=dtype, device=device) if out is None else out
            for j, each in enumerate(landing.view(ranks, length)):
                result.narrow(source, j * part[source], part[source]).copy_(codec.decode(each, part, dtype))
            return result

        return owner._exchange(landing, sent, route.channel), finish, (sent, landing), (sent, landing)

    return begin
