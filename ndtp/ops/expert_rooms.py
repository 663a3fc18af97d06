"""Rows through experts in buffers of one size for all routings: no number of rows is read in the host.

    chosen   [tokens * k]                        the expert of each choice; the number of experts: none
    sent     [chunks, ranks, room, hidden / ..]  as this rank sends them: a room for each rank that has experts
    arrived  [holders, room, hidden / ..]        of each chunk, where its first product begins: a room for each rank
                                                 that brought rows

In a room rows lie sorted by expert, with zeros behind them.  Where they are multiplied, all rooms' rows are sorted by
expert, with the zeros behind the last expert's; where each expert begins is a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ndtp.algebra.row_flow import RowFlow
from ndtp.compute.grouped import DeviceGroups
from ndtp.compute.torch_calls import AutogradContext
from ndtp.ops.experts import Arrival, Permutation


class Rooms:
    """The places of a rank's choices in its rooms, and of the rows that arrive.

    Args:
        chosen: the expert of each choice, token by token; `counts.shape[0]` for a choice that does not count.
        counts: [experts], how many choices of this rank each expert has.
        table: [positions along the flows' axes, experts], those of all ranks that this rank has to know.
        flows: of each chunk, whose moves are those of the rooms.
        error: what is said where a rank has more rows for another than its room takes; None: no rank can have.
    """

    def __init__(
        self, chosen: Tensor, counts: Tensor, table: Tensor, flows: Sequence[RowFlow], error: str | None = None
    ) -> None:
        self.table, self.flows = table, flows
        self.room = flows[0].dispatch.sends[0]
        self.ranks = len(flows[0].dispatch.sends)
        self.size = len(flows) * self.ranks * self.room
        if error is not None:
            most = table.unflatten(1, (self.ranks, -1)).sum(2).max()
            torch._assert_async(most <= len(flows) * self.room, error)  # by the device, which then does no more
        self.places = self._places(chosen, counts)

    def _places(self, chosen: Tensor, counts: Tensor) -> Tensor:
        """Return the place of each choice among the rows that are sent; `size` for one that does not count.

        Each chunk has an equal part of the rows for each rank, as those lie sorted by expert and then by token.
        """
        experts, chunks = counts.shape[0], len(self.flows)
        totals = counts.new_zeros(self.ranks + 1)
        totals[: self.ranks] = counts.view(self.ranks, -1).sum(1)
        order = chosen.argsort(stable=True)
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rank = chosen // (experts // self.ranks)  # `ranks`: of none
        place = position - (totals.cumsum(0) - totals)[rank]
        if chunks > 1:
            total = totals.clamp(min=1)[rank]
            chunk = ((place + 1) * chunks - 1) // total
            place = place - total * chunk // chunks + chunk * self.ranks * self.room
        return torch.where(rank < self.ranks, place + rank * self.room, self.size)

    def arrival(self, i: int) -> Arrival:
        """Return the order of the rows of chunk i by expert, and where each expert begins."""
        flow, chunks = self.flows[i], len(self.flows)
        mine = flow.plan.local_experts(flow.experts, flow.rank)
        counts = torch.stack([self.table[holder, mine.start : mine.stop] for holder in flow.holders])
        ends, totals = counts.cumsum(1), counts.sum(1, keepdim=True)
        first, last = totals * i // chunks, totals * (i + 1) // chunks
        ends = torch.minimum(torch.maximum(ends, first), last) - first
        sizes = ends.diff(dim=1, prepend=torch.zeros_like(first)).sum(0)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
        return Arrival(None if len(counts) == 1 else Permutation(lambda: self._sorted(ends)), DeviceGroups(offsets))

    def _sorted(self, ends: Tensor) -> Tensor:
        """Return the positions of arrived rows in the order of experts, those of no expert at the end."""
        number = torch.arange(self.room, device=ends.device)
        expert = torch.searchsorted(ends, number.expand(len(ends), -1).contiguous(), right=True)
        return expert.flatten().argsort(stable=True)

    # ------------------------------------------------------------------------------------------------ there and back

    def dispatched(self, x: Tensor, top_k: int) -> list[Tensor]:
        """Return the rows of tokens [tokens, ..] at their places among zeros, chunk by chunk."""
        sent: Tensor = _Dispatched.apply(x, self, top_k)  # type: ignore[no-untyped-call]
        return list(sent.split([flow.dispatch.before for flow in self.flows]))

    def combined(self, parts: Sequence[Tensor], gates: Tensor) -> Tensor:
        """Return the tokens' sums of what their experts made, weighted: the way back of `dispatched`.

        Args:
            gates: [tokens, top_k].
        """
        y = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
        each: Tensor = _Taken.apply(y, self)  # type: ignore[no-untyped-call]
        each = each.view(*gates.shape, y.shape[1])
        return (each * gates.to(y.dtype).unsqueeze(-1)).sum(1)

    def put(self, each: Tensor) -> Tensor:
        """Return the rows [choices, ..] at their places among zeros."""
        room = each.new_zeros(self.size + 1, *each.shape[1:])  # the last one takes what does not count
        return room.index_copy_(0, self.places, each)[:-1]

    def take(self, sent: Tensor) -> Tensor:
        """Return the rows of the choices [choices, ..], zeros for those that do not count."""
        if not self.size:
            return sent.new_zeros(len(self.places), *sent.shape[1:])
        each = sent.index_select(0, self.places.clamp(max=self.size - 1))
        return each.masked_fill_((self.places == self.size).unsqueeze(1), 0)


class _Dispatched(torch.autograd.Function):
    """A token's gradient is the sum over its choices, in their order."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, rooms: Rooms, top_k: int) -> Tensor:
        ctx.rooms, ctx.top_k = rooms, top_k
        return rooms.put(x.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1))

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        each = ctx.rooms.take(grad)
        return each.view(-1, ctx.top_k, each.shape[1]).sum(1), None, None


class _Taken(torch.autograd.Function):
    """The rows of choices out of the rooms, whose gradients go back to their places among zeros."""

    @staticmethod
    def forward(ctx: AutogradContext, y: Tensor, rooms: Rooms) -> Tensor:
        ctx.rooms = rooms
        return rooms.take(y)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rooms.put(grad), None
