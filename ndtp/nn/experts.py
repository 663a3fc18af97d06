"""`Experts`: all experts of a layer as two sharded parameters, and the way of tokens to them and back."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.expert_plan import ExpertPlan
from ndtp.algebra.layout import Layout
from ndtp.algebra.row_flow import Counts, RowFlow, chunk_counts, room_counts
from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.compute.grouped import tally
from ndtp.errors import LayoutError
from ndtp.nn.parameters import fill_uniform
from ndtp.nn.random import given_or_drawn
from ndtp.nn.sharded import Sharded
from ndtp.ops.expert_rooms import Rooms
from ndtp.ops.experts import combined, dispatched, experts, known_counts, weight_plan
from ndtp.ops.reductions import used_over
from ndtp.runtime.arrival import is_plain, local_shard, stored_shape
from ndtp.runtime.eagerly import backwards_as_they_are, eagerly
from ndtp.runtime.process_grid import ProcessGrid

Buffers = str | float
EXACT, WORST_CASE = "exact", "worst-case"
OVERFLOW = (
    "MoE '{}': a rank has more rows for the experts of another rank than buffers={} times the mean\n"
    "  fix: a greater factor, buffers='worst-case', or a router with a capacity, which drops choices"
)
TOKENS = (
    "MoE '{}': ranks have other numbers of tokens, and buffers of one size follow from a rank's own\n"
    "  fix: as many tokens on every rank, or buffers='exact'"
)
WHY = (
    "ndtp: a layer of experts runs eagerly between two graphs: how many rows go to whom are numbers of the batch, "
    "which no graph can hold. fix: leave out fullgraph=True"
)


def known_buffers(buffers: Buffers, name: str) -> Buffers:
    """Return what was given as buffers of experts.

    Raises:
        LayoutError: it is neither a known name nor a factor.
    """
    is_factor = isinstance(buffers, (int, float)) and not isinstance(buffers, bool) and 1 <= buffers < math.inf
    if buffers not in (EXACT, WORST_CASE) and not is_factor:
        raise LayoutError(
            f"MoE '{name}': buffers={buffers!r} is neither '{EXACT}' nor '{WORST_CASE}' nor a factor of the mean\n"
            f"  fix: '{EXACT}', '{WORST_CASE}', or a number from 1"
        )
    return buffers


SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate", "up", "down"))


def _in_own_form(state: dict[str, Any], prefix: str, count: int, gated: bool, unexpected: list[str]) -> dict[str, Any]:
    """A state dict with the weights of experts by any names that dense models give them, in the layer's own form.

    | form | keys behind the prefix | shape |
    |---|---|---|
    | own, gated | `gate_up_proj`, `down_proj` | [experts, 2, inner, hidden], [experts, hidden, inner] |
    | own, not gated | `up_proj`, `down_proj` | [experts, inner, hidden], [experts, hidden, inner] |
    | fused (transformers) | `gate_up_proj`, `down_proj` | [experts, 2 * inner, hidden], [experts, hidden, inner] |
    | separate | `0.gate_proj.weight`, `0.up_proj.weight`, `0.down_proj.weight` ... | those of `nn.Linear` |
    | separate (Mixtral's files) | `0.w1.weight`, `0.w3.weight`, `0.w2.weight` ... | the same |
    """
    up_name = f"{prefix}{'gate_up_proj' if gated else 'up_proj'}"
    for gate, up, down in SEPARATE:
        names = ([gate] if gated else []) + [up, down]
        keys = [[f"{prefix}{i}.{name}.weight" for name in names] for i in range(count)]
        if all(isinstance(state.get(key), Tensor) for each in keys for key in each):
            *ups, downs = ([_whole(state.pop(key)) for key in of] for of in zip(*keys, strict=True))
            stacked = [torch.stack(each) for each in ups]
            state[up_name] = torch.stack(stacked, 1) if gated else stacked[0]
            state[f"{prefix}down_proj"] = torch.stack(downs)
            taken = {key for each in keys for key in each}
            unexpected[:] = [key for key in unexpected if key not in taken]
    value = state.get(up_name)
    if gated and isinstance(value, Tensor) and len(stored_shape(value)) == 3 and value.shape[1] % 2 == 0:
        state[up_name] = _whole(value).unflatten(1, (2, -1))
    return state


def _whole(x: Any) -> Tensor:
    return x.detach() if is_plain(x) else x.full_tensor()  # type: ignore[no-any-return]


class Experts(Sharded):
    """The sum over a token's experts e of `gate_e * down_e(activation(up_e(x)))`, with experts split over ranks.

        x        [tokens, hidden]  as `plan.tokens`       returns the same
        choice   [tokens, k]  which experts               gates  [tokens, k]  their weights

        up_proj  [experts, inner, hidden]                 down_proj  [experts, hidden, inner]

    Gated experts (`activation(gate_e(x)) * up_e(x)`) have `gate_up_proj` [experts, 2, inner, hidden], gates first: the
    memory of the [experts, 2 * inner, hidden] that transformers has, which loads as it is.

    Args:
        chunks: of each expert's rows; the exchange of one runs beside the products of another.
        buffers: as for `ndtp.nn.MoE`.

    Attributes:
        buffer_kind: the `buffers` that were given.
        last_counts: of the last forward: how many rows each rank along `plan.count_axes` had for each expert; none with
            buffers of one size, whose numbers stay on the device.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        count: int,
        activation: str = "silu",
        gated: bool = True,
        *,
        plan: ExpertPlan,
        mesh: ProcessGrid,
        chunks: int = 1,
        buffers: Buffers = EXACT,
        device: Device = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        name: str = "moe",
    ) -> None:
        super().__init__(mesh, seed, name)
        plain = [known for known, of in ACTIVATIONS.items() if of.width == 1]
        if activation not in plain:
            raise ValueError(f"MoE '{name}': activation {activation!r} is not one of {', '.join(plain)}")
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise LayoutError(f"MoE '{name}': chunks={chunks!r} is not a number of chunks")
        self.buffer_kind = known_buffers(buffers, name)
        plan.check(hidden, inner, count)
        backwards_as_they_are()
        self.hidden, self.inner, self.count, self.plan, self.chunks = hidden, inner, count, plan, chunks
        self.activation, self.is_gated = activation, gated
        self.expected: tuple[Counts, int] = ((), 0)  # of rows without memory: their counts, and the margin of the flows
        self.last_counts: Counts = []
        of_up = weight_plan(plan.up, 4 if gated else 3).source
        self.up_name = "gate_up_proj" if gated else "up_proj"
        shape = (count, 2, inner, hidden) if gated else (count, inner, hidden)
        self.add(self.up_name, shape, of_up, device, dtype)
        self.add("down_proj", (count, hidden, inner), plan.down.b, device, dtype)
        if not self.down_proj.is_meta:
            self.reset_parameters()

    down_proj: nn.Parameter

    @property
    def up(self) -> nn.Parameter:
        return getattr(self, self.up_name)  # type: ignore[no-any-return]

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw each expert as a pair of `nn.Linear`; the same values on every grid."""
        seed = given_or_drawn(seed, self.seed)
        for name, fan_in in ((self.up_name, self.hidden), ("down_proj", self.inner)):
            lies = self.lies[name]
            bound = 1 / math.sqrt(fan_in)
            fill_uniform(getattr(self, name), lies.layout, self.mesh, bound, lies.real, seed, f"{self.name}.{name}")

    # ------------------------------------------------------------------------------------------------------- forward

    @eagerly(WHY)
    def forward(self, x: Tensor, choice: Tensor, gates: Tensor, kept: Tensor | None = None) -> Tensor:
        """Apply to each token the experts of its choice, and sum the results weighted by `gates`.

        Args:
            kept: [tokens, k], the choices that count; default: all.
        """
        if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weights = [self.needed(name, x) for name in (self.up_name, "down_proj")]
        top_k = choice.shape[1]
        wanted = choice.flatten() if kept is None else torch.where(kept, choice, self.count).flatten()
        counts = tally(wanted, self.count + 1)[: self.count]
        table = known_counts(counts.int(), self.plan.count_axes, self.mesh, self.name)
        gates = used_over(
            gates, Layout(self.mesh.grid, self.plan.tokens.dims[0], None), self.plan.features, self.mesh, self.name
        )
        weights = [weight if weight.dtype == x.dtype else local_shard(weight).to(x.dtype) for weight in weights]
        through = (weights, self.mesh, self.activation, self.is_gated, self.name)
        if self.buffer_kind != EXACT:
            if kept is None and not x.is_meta:
                torch._assert_async((table.sum(1) == wanted.numel()).all(), TOKENS.format(self.name))
            error = None if self.buffer_kind == WORST_CASE else OVERFLOW.format(self.name, self.buffer_kind)
            rooms = Rooms(wanted, counts, table, self._flows_of_rooms(wanted.numel()), error)
            return rooms.combined(experts(rooms.dispatched(x, top_k), rooms.flows, *through, rooms.arrival), gates)
        self.last_counts, margin = self.expected if x.is_meta else (table.tolist(), 0)
        flows = self.flows(self.last_counts, margin=margin)
        rows = sum(flow.dispatch.before for flow in flows)
        order = self._order(wanted, counts, rows)
        sent = dispatched(x, order, top_k).split([flow.dispatch.before for flow in flows])
        parts = experts(sent, flows, *through)
        return combined(torch.cat(parts) if len(parts) > 1 else parts[0], order, gates)

    def _order(self, wanted: Tensor, counts: Tensor, rows: int) -> Tensor:
        """Choices by chunk, then by expert, then by token."""
        order = wanted.argsort(stable=True)[:rows]
        if self.chunks > 1:
            of, starts = wanted[order], counts.cumsum(0) - counts
            place = torch.arange(rows, device=order.device) - starts[of]
            order = order[(((place + 1) * self.chunks - 1) // counts[of]).argsort(stable=True)]
        return order

    def flows(
        self, counts: Counts, axes: tuple[str, ...] | None = None, rank: int | None = None, margin: int = 0
    ) -> list[RowFlow]:
        """Return the moves of rows, chunk by chunk.

        Args:
            counts: how many rows each position along `axes` (default: `plan.count_axes`) has for each expert.
            rank: default: this one.
            margin: as of `RowFlow`.
        """
        axes, rank = self.plan.count_axes if axes is None else axes, self.mesh.rank if rank is None else rank
        if self.chunks == 1:
            return [RowFlow(self.plan, rank, counts, axes, margin)]
        parts = (chunk_counts(counts, i, self.chunks) for i in range(self.chunks))
        return [RowFlow(self.plan, rank, part, axes, margin) for part in parts]

    def _flows_of_rooms(self, choices: int) -> list[RowFlow]:
        """Return the moves of buffers that hold so many choices of this rank, chunk by chunk."""
        factor = self.plan.ranks if isinstance(self.buffer_kind, str) else self.buffer_kind
        room = min(choices, math.ceil(choices * factor / self.plan.ranks))
        counts = room_counts(self.plan, self.count, -(-room // self.chunks))
        return [RowFlow(self.plan, self.mesh.rank, counts, self.plan.count_axes)] * self.chunks

    # ---------------------------------------------------------------------------------------------------- state dict

    @torch.no_grad()
    def load_dense(self, up: Tensor, down: Tensor) -> Experts:
        """Take over the weights of dense experts; gated ones' `up` may be [experts, 2 * inner, hidden].

        Raises:
            LayoutError: other shapes.
        """
        if self.is_gated and up.dim() == 3 and up.shape[1] == 2 * self.inner:
            up = up.detach().unflatten(1, (2, self.inner)).requires_grad_(up.requires_grad)
        self.take_over(self.up_name, up)
        self.take_over("down_proj", down)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict = _in_own_form(dict(state_dict), prefix, self.count, self.is_gated, rest[3])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        gated = ", gated" if self.is_gated else ""
        return f"{self.count} experts, {self.hidden}, {self.inner}, {self.activation}{gated}, {self.plan.up}"
