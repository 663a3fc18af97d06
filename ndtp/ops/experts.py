"""Rows through experts: dispatched, multiplied expert by expert on the grid inside, and combined; differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.row_flow import Moves, RowFlow, RowMove, RowWay, sorting_index
from ndtp.algebra.steps import Step
from ndtp.collectives.rows_exchange import start_rows
from ndtp.compute.activations import activation_named
from ndtp.compute.grouped import AnyGroups, Groups, grouped_product
from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import refuse_second
from ndtp.ops.moving import moved, taken
from ndtp.runtime.arrival import stored_shape
from ndtp.runtime.recheck import LookedAt

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike


_KINDS = {"forward": "activations", "dgrad": "activation_gradients"}  # of rows, by phase


def experts(
    rows: Sequence[Tensor],
    flows: Sequence[RowFlow],
    weights: Sequence[Tensor],
    mesh: GridLike,
    activation: str,
    gated: bool,
    name: str = "moe",
    arrival: Callable[[int], Arrival] | None = None,
) -> list[Tensor]:
    """Apply the experts to rows that are sorted by expert, and return the results in the same order.

        rows     [.., hidden / ..]            of each chunk, this rank's, sorted by expert
        weights  [experts / e, .., ..]        its shards of up and down, laid out as `flow.plan.up.b` and `.down.b`;
                                              gated: up is [experts / e, 2, .., ..], the gates first
        returns  [.., hidden / ..]            of each chunk

        forward  y = A2A_e( RS( act( RS( AG(A2A_e(x)) . up^T ) ) . down^T ) )

    Steps between the two all-to-alls are those of the plans' products, with as many rows as there are and no padding.
    All chunks' rows leave before the first one is multiplied, and weights are gathered beside that one's way: the link
    never waits for a product while there are rows to send, and what the experts made of chunk i travels beside the
    products of those after it.  Backward likewise: all gradients leave first, and those of the tokens are waited for
    when all products are done.

    Args:
        activation: of the gate, where there is one.
        arrival: the order and the groups of a chunk's rows where they are multiplied; default: those of its flow.
    """
    plan = flows[0].plan
    there = [_start(rows[0], flows[0].dispatch, mesh, name, _part(0, flows))]
    up, down = (
        taken(weight, weight_plan(of, len(stored_shape(weight))), mesh)
        for weight, of in zip(weights, (plan.up, plan.down), strict=True)
    )
    up = up.flatten(1, 2) if gated else up
    # Autograd goes back in the order in which nodes were made: these are the last that backward waits for.
    there += [_start(rows[i], flows[i].dispatch, mesh, name, _part(i, flows)) for i in range(1, len(flows))]
    back = []
    for i, flow in enumerate(flows):
        entering, leaving, again, out = flow.ways
        order, groups = Arrival.of(flow, rows[i].device) if arrival is None else arrival(i)
        x = _along(_finish(there[i]), entering, mesh, plan.up.name)
        x = x if order is None else _Sorted.apply(x, order, False)  # type: ignore[no-untyped-call]
        h = grouped_product(x, up, groups, _multiplier(mesh, plan.up.name))
        if gated and plan.moves_features:  # a split of features keeps gate and up together where they take turns
            h = h.unflatten(1, (2, -1)).mT.flatten(1)
        h = _activated(_along(h, leaving, mesh, plan.up.name), activation, gated, plan.moves_features)
        y = grouped_product(_along(h, again, mesh, plan.down.name), down, groups, _multiplier(mesh, plan.down.name))
        y = y if order is None else _Sorted.apply(y, order, True)  # type: ignore[no-untyped-call]
        back.append(_start(_along(y, out, mesh, plan.down.name), flow.combine, mesh, name, _part(i, flows)))
    return [_finish(trip) for trip in back]


def _multiplier(mesh: GridLike, name: str) -> object:
    """Return the multiplier of one product of experts, which the probe may look at."""
    return mesh.gemm if mesh.step.recheck is None else LookedAt(mesh.gemm, mesh.step.recheck, name)


def _activated(h: Tensor, activation: str, gated: bool, in_turns: bool) -> Tensor:
    function = activation_named(activation)
    if not gated:
        return function(h)
    gate, up = (h[:, 0::2], h[:, 1::2]) if in_turns else h.chunk(2, 1)
    return function(gate) * up


def weight_plan(plan: MatMulPlan, ndim: int = 3) -> RelayoutPlan:
    """Return the relayout from a weight's shard to the part that a product uses, which also takes its gradient back.

    Args:
        ndim: 4 where the weight of each expert is [2, out, in], the gates first.
    """
    need, parts = plan.need(plan.b_letters), ((),) * (ndim - 3)
    stored, used = (Layout(plan.grid, dims[0], *parts, *dims[1:]) for dims in (plan.b.dims, need))
    return RelayoutPlan(stored, used, (), plan.grid.nontrivial(plan.lacks(plan.b_letters)), plan.name, "weights")


def _part(i: int, flows: Sequence[RowFlow]) -> str:
    return f"{i + 1}/{len(flows)}" if len(flows) > 1 else ""


def known_counts(counts: Tensor, axes: Sequence[str], mesh: GridLike, name: str) -> Tensor:
    """Gather the counts [n] of every rank along `axes` to [ranks, n], in the order of the grid's index on them."""
    if mesh.grid.size(axes) == 1:
        return counts[None]
    return moved(counts[None], (Step("all_gather", tuple(axes), 0),), mesh, name, "counts")


def dispatched(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """The rows of tokens [tokens, ..] in the order of their experts.

    Args:
        order: places in [tokens * top_k], token by token, of the choices that are kept.
    """
    result: Tensor = _Dispatched.apply(x, order, top_k)  # type: ignore[no-untyped-call]
    return result


def combined(y: Tensor, order: Tensor, gates: Tensor) -> Tensor:
    """The tokens' sums of what their experts made, weighted: the way back of `dispatched`.

    Args:
        gates: [tokens, top_k].
    """
    tokens, top_k = gates.shape
    each: Tensor = _Placed.apply(y, order, tokens * top_k)  # type: ignore[no-untyped-call]
    each = each.view(tokens, top_k, y.shape[1])
    return (each * gates.to(y.dtype).unsqueeze(-1)).sum(1)


class _Dispatched(torch.autograd.Function):
    """A token's gradient is the sum over its choices, in their order: no atomics, the same every time."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.shape, ctx.top_k = x.shape, top_k
        ctx.save_for_backward(order)
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,), (tokens, features) = ctx.saved_tensors, ctx.shape
        each = grad.new_zeros(tokens * ctx.top_k, features).index_copy_(0, order, grad)
        return each.view(tokens, ctx.top_k, features).sum(1), None, None


class _Placed(torch.autograd.Function):
    """Rows at their places among zeros.  torch's `index_copy` would keep them from forward to backward, for nothing."""

    @staticmethod
    def forward(ctx: AutogradContext, y: Tensor, order: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(order)
        return y.new_zeros(places, y.shape[1]).index_copy_(0, order, y)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


# ----------------------------------------------------------------------------------------------- sent off, waited for


class _Trip:
    """A move between where it starts and where it is waited for, and that of its gradient."""

    def __init__(self, move: RowMove, mesh: GridLike, name: str, part: str) -> None:
        self.move, self.mesh, self.name, self.part = move, mesh, name, part
        self.under_way: Any = None
        self.placeholder: Tensor | None = None

    def start(self, x: Tensor, move: RowMove, phase: str) -> None:
        self.mesh.step.late.enter()
        alone = len(move.sends) == 1
        handle = (
            None if alone else start_rows(x, move, self.mesh.collectives, self.name, phase, self.part, _KINDS[phase])
        )
        self.under_way = (x, handle)

    def wait(self) -> Tensor:
        (x, handle), self.under_way = self.under_way, None
        return x.view_as(x) if handle is None else handle.wait()


def _start(x: Tensor, move: RowMove, mesh: GridLike, name: str, part: str) -> _Trip:
    trip = _Trip(move, mesh, name, part)
    trip.placeholder = _Start.apply(x, trip)  # type: ignore[no-untyped-call]
    return trip


def _finish(trip: _Trip) -> Tensor:
    placeholder, trip.placeholder = trip.placeholder, None  # its node holds the trip
    result: Tensor = _Finish.apply(placeholder, trip)  # type: ignore[no-untyped-call]
    return result


class _Start(torch.autograd.Function):
    """Sends rows off; in backward it waits for their gradient, which `_Finish` has sent off."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.start(x.detach(), trip.move, "forward")
        return x.new_zeros(()).expand(trip.move.after, *x.shape[1:])

    @staticmethod
    def backward(ctx: AutogradContext, placeholder: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, placeholder: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.wait()

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        refuse_second(trip.name)
        trip.start(grad, trip.move.back, "dgrad")
        return grad.new_zeros(()).expand(grad.shape), None


# ------------------------------------------------------------------------------------------------------- one by another


def _along(x: Tensor, way: RowWay, mesh: GridLike, name: str) -> Tensor:
    """`x` by the steps of a way; its gradient by those back."""
    if not way.there and not way.back:
        return x
    result: Tensor = _Along.apply(x, way, mesh, name)  # type: ignore[no-untyped-call]
    return result


class _Along(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, way: RowWay, mesh: GridLike, name: str) -> Tensor:
        ctx.way, ctx.mesh, ctx.name = way, mesh, name
        result = _by_moves(x, way.there, mesh, name, "forward")
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second(ctx.name)
        ctx.mesh.step.late.enter()
        return _by_moves(grad, ctx.way.back, ctx.mesh, ctx.name, "dgrad"), None, None, None


def _by_moves(x: Tensor, moves: Moves, mesh: GridLike, name: str, phase: str) -> Tensor:
    for move in moves:
        if isinstance(move, RowMove):
            x = start_rows(x, move, mesh.collectives, name, phase, kind=_KINDS[phase]).wait()
        else:
            x = moved(x.contiguous(), (move,), mesh, name, phase, _KINDS[phase])
    return x


class Arrival(NamedTuple):
    """The order of rows by expert, where they do not arrive so, and which of them are whose then."""

    order: Permutation | None
    groups: AnyGroups

    @classmethod
    def of(cls, flow: RowFlow, device: torch.device) -> Arrival:
        """The arrival of as many rows as the flow says."""
        order = None if flow.is_sorted else Permutation(lambda: _order_of(flow, device))
        return cls(order, Groups(flow.sizes, device))


class Permutation:
    """A permutation of rows, made at its first use, and the way back.

    Args:
        make: gives the position of each row of the result.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    @cached_property
    def index(self) -> Tensor:
        return self._make()

    @cached_property
    def inverse(self) -> Tensor:
        inverse = torch.empty_like(self.index)
        inverse[self.index] = torch.arange(len(inverse), device=inverse.device)
        return inverse

    def __call__(self, x: Tensor, back: bool) -> Tensor:
        return x.index_select(0, self.inverse if back else self.index)


def _order_of(flow: RowFlow, device: torch.device) -> Tensor:
    """Return the position of each row in the order of the experts.

    It is computed on the host, also for tensors on meta, since it takes memory.
    """
    segments = list(sorting_index(flow.segments))
    count, host = sum(rows for _, rows in segments), "meta" if device.type == "meta" else "cpu"
    starts, counts = torch.tensor(segments, dtype=torch.int64, device=host).unbind(1)
    ends = counts.cumsum(0)
    index = torch.repeat_interleave(starts - (ends - counts), counts, output_size=count)
    return (index + torch.arange(count, device=host)).to(device)


class _Sorted(torch.autograd.Function):
    """A permutation of rows, whose gradient is the one back and no sum."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, order: Permutation, back: bool) -> Tensor:
        ctx.order, ctx.back = order, back
        return order(x, back)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.order(grad, not ctx.back), None, None
