"""`MoE`: a mixture of experts on a grid of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.expert_plan import ExpertPlan, expert_plan
from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.row_flow import Counts, RowFlow
from ndtp.algebra.schemes import BlockLayouts, block_layouts
from ndtp.algebra.volume import Volume
from ndtp.compute.grouped import tally
from ndtp.errors import LayoutError
from ndtp.nn.experts import EXACT, WHY, Buffers, Experts
from ndtp.nn.gated import GatedMLP
from ndtp.nn.mlp import MLP
from ndtp.nn.padding import as_rows, with_leading_dims
from ndtp.nn.random import draw_seed
from ndtp.nn.router import Router, Routing
from ndtp.nn.routers import ROUTERS, DeepSeek
from ndtp.nn.sharded import BlockModule, memory_of, volume_of
from ndtp.ops.experts import known_counts
from ndtp.ops.memory import Memory
from ndtp.ops.moving import enter
from ndtp.ops.reductions import reduce, used_over
from ndtp.ops.resharding import reshard
from ndtp.runtime.eagerly import eagerly
from ndtp.runtime.given_mesh import GivenWire, given_mesh
from ndtp.runtime.of_turn import OfTurn
from ndtp.runtime.process_grid import ProcessGrid

Routes = str | Counts | Tensor
BoundaryWay = RelayoutPlan | tuple[Layout, Layout, str]  # legal step by step, or from anywhere to anywhere


class MoE(BlockModule):
    """Every token goes through `top_k` of `experts` MLPs, which lie on other ranks than it does.

        x        [tokens, hidden]  as `in_layout`     returns the same as `out_layout`

    Experts are split over `expert_axis`, and each of them over the other axes as the scheme says.  A token's row goes
    to the ranks of its experts and back by two all-to-alls of as many rows as the routing says; nothing is padded, and
    an expert that nobody chose has gradients of zeros.  The axes of experts split the tokens, as data parallelism does;
    they may be any axes of the grid, attention's own among them, or parts of these (`ProcessGrid.refine`).

    Args:
        hidden, inner: features outside, and inside of an expert.
        experts: how many there are; the ranks along `expert_axis` divide it.
        top_k: experts a token; default: the router's, else 2.
        router: a name of `ndtp.nn.routers.ROUTERS`, or a class like these.
        options: of the router, such as `capacity`, `balance`, `z_loss`; see `ndtp.nn.routers`.
        activation: by name; of the gate where experts are gated.
        gated: whether experts are `down(activation(gate(x)) * up(x))`.
        shared: features inside of an expert that every token goes through, as an MLP of the same scheme; 0: none.
        shared_gate: whether its result is weighted by a sigmoid of the token (Qwen2-MoE).
        mesh: the process grid.
        scheme, axes, layouts: as for `ndtp.nn.MLP`: of the layer's two ends, and of an expert but for `expert_axis`.
        expert_axis: one axis or several; default: "e" if the grid has it, else none.
        chunks: of each expert's rows, whose exchanges and products overlap.
        buffers: "exact": the host asks the device for the numbers of rows, in each forward, and moves so many.  With
            "worst-case" it does not ask, and buffers hold as many rows as there can be; so the layer can be captured.
            A factor makes them that many times the rows of an even routing; more rows than these are an error.
        device, dtype, wire, seed, name: as for `ndtp.nn.MLP`.  What a router sends travels as it is computed.

    Attributes:
        routing: the last forward's `ndtp.nn.router.Routing`; for losses, `aux_loss`.

    Raises:
        LayoutError: axes, layouts or sizes that do not fit.
        ValueError: an unknown router or activation.
    """

    routing = OfTurn()

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int | None = None,
        router: str | Callable[..., Router] = "mixtral",
        activation: str = "silu",
        gated: bool = True,
        shared: int = 0,
        shared_gate: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ProcessGrid,
        scheme: str = "3d",
        axes: Sequence[str] | None = None,
        layouts: BlockLayouts | None = None,
        expert_axis: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        chunks: int = 1,
        buffers: Buffers = EXACT,
        wire: GivenWire = None,
        seed: int | None = None,
        name: str = "moe",
    ) -> None:
        super().__init__()
        mesh = given_mesh(mesh, name, wire=wire)
        if isinstance(router, str) and router not in ROUTERS:
            raise ValueError(f"MoE '{name}': router {router!r} is not one of {', '.join(ROUTERS)}")
        self.layouts = layouts or block_layouts(mesh.grid, scheme, axes)
        self.plan: ExpertPlan = expert_plan(self.layouts, _axes_of_experts(expert_axis, mesh), name)
        self.mesh, self.name, self.hidden, self.inner, self.num_experts = mesh, name, hidden, inner, experts
        is_meta = device is not None and torch.device(device).type == "meta"
        seed = draw_seed() if seed is None and not is_meta else seed
        made = ROUTERS[router] if isinstance(router, str) else router
        given = {**getattr(made, "defaults", {}), **(options or {})}
        preset = given.pop("top_k", 2)
        shared_arguments: dict[str, Any] = {"mesh": mesh, "device": device, "dtype": dtype, "seed": seed}
        self.router = made(
            hidden, experts, preset if top_k is None else top_k, tokens=self.plan.tokens, name=f"{name}.router",
            **shared_arguments, **given,
        )  # fmt: skip
        self.top_k = self.router.top_k
        self.experts = Experts(
            hidden, inner, experts, activation, gated, plan=self.plan, chunks=chunks, buffers=buffers, name=name,
            **shared_arguments,
        )  # fmt: skip
        self.shared: MLP | None = None
        self.shared_gate: Router | None = None
        if shared:
            kind = GatedMLP if gated else MLP
            self.shared = kind(
                hidden, shared, activation, False, layouts=self.layouts, name=f"{name}.shared", **shared_arguments
            )
        if shared and shared_gate:
            gate_name = f"{name}.shared_gate"
            self.shared_gate = Router(hidden, 1, 1, tokens=self.in_layout, name=gate_name, **shared_arguments)
        self._ways = self._to_experts_and_back()

    def _to_experts_and_back(self) -> list[BoundaryWay]:
        into, out = (self.in_layout, self.plan.tokens), (self.plan.tokens, self.out_layout)
        return [_way(*into, f"{self.name}.in"), _way(*out, f"{self.name}.out")]

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all parameters anew; the same values on every grid."""
        for part in (self.router, self.experts, self.shared, self.shared_gate):
            if part is not None:
                part.reset_parameters(seed)

    # ------------------------------------------------------------------------------------------------------- forward

    @eagerly(WHY)
    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(x, self.name)
        width = self.hidden // self.mesh.grid.size(self.in_layout.dims[1])
        if rows.shape[1] != width:
            raise LayoutError(
                f"MoE '{self.name}': x has {rows.shape[1]} features; of {self.hidden} as {self.in_layout} on grid "
                f"{self.mesh.grid} a rank has {width}"
            )
        enter(self.mesh, self.plan.up, rows)
        x_rows, rows = rows, self._moved(rows, self._ways[0])
        self.routing = routing = self.router(rows)
        y = self._moved(self.experts(rows, routing.experts, routing.gates, routing.kept), self._ways[1])
        if self.shared is not None:
            y = y + self._shared(x_rows)
        return with_leading_dims(y, x.shape[:-1], f"MoE '{self.name}'")

    def _moved(self, x: Tensor, way: BoundaryWay) -> Tensor:
        if isinstance(way, RelayoutPlan):
            return reduce(x, way, self.mesh)
        return reshard(x, *way[:2], self.mesh, name=way[2])

    def _shared(self, rows: Tensor) -> Tensor:
        assert self.shared is not None
        y = self.shared(rows)
        if self.shared_gate is None:
            return y
        rows_alone = Layout(self.mesh.grid, self.in_layout.dims[0], None)
        gate = used_over(
            self.shared_gate.logits(rows), rows_alone, self.out_layout.dims[1], self.mesh, self.shared_gate.name
        )
        return y * gate.sigmoid().to(y.dtype)

    @property
    def aux_loss(self) -> Tensor:
        """The sum of the router's losses in the last forward, times their coefficients; 0 where it has none.

        Of the whole batch, and the same on every rank: add it to the loss of the batch on every rank.
        """
        losses = {} if self.routing is None else self.routing.losses
        return sum(losses.values(), torch.zeros((), device=self.router.weight.device))

    def update_bias(self) -> None:
        """Update the router's bias once a step, for routers that balance by bias ("deepseek"); see
        `DeepSeek.update_bias`.
        """
        if isinstance(self.router, DeepSeek):
            self.router.update_bias()

    # ------------------------------------------------------------------------------------------------------- metrics

    @torch.no_grad()
    def counts(self) -> Tensor:
        """Return the numbers of rows [blocks of rows, experts] of the last forward; a collective.

        Blocks are in the order of the axes that split tokens (`plan.row_axes`), as `volume` takes them.
        """
        routing, axes = self._last(), self.plan.row_axes
        chosen = routing.experts if routing.kept is None else routing.experts[routing.kept]
        counts = tally(chosen, self.num_experts).int()
        return known_counts(counts, axes, self.mesh, self.name)

    def metrics(self) -> dict[str, Any]:
        """Return figures of the last forward, such as the load of the experts; a collective.

        `load`: rows of each expert as a fraction of all; `imbalance`: the largest of them times the number of experts;
        `dropped`: the fraction of choices that found no room; `entropy`: of the load, 1 where it is even;
        `unused`: experts without rows.
        """
        routing, counts = self._last(), self.counts().sum(0).double()
        choices = routing.experts.numel() * self.mesh.grid.size(self.plan.row_axes)
        load = counts / counts.sum().clamp(min=1)
        spread = -(load * load.clamp(min=1e-300).log()).sum() / max(torch.tensor(float(len(load))).log().item(), 1e-300)
        return {
            "load": load.tolist(),
            "imbalance": float(load.max() * len(load)),
            "dropped": 1 - float(counts.sum()) / max(choices, 1),
            "entropy": float(spread),
            "unused": int((counts == 0).sum()),
        }

    def _last(self) -> Routing:
        if self.routing is None:
            raise ValueError(f"MoE '{self.name}': nothing was routed yet\n  fix: run it once")
        return self.routing

    # -------------------------------------------------------------------------------------------------------- volume

    def volume(
        self, tokens: int, dgrad: bool = True, *, routing: Routes = "balanced", rank: int | None = None
    ) -> Volume:
        """The exact traffic of a forward and backward of `tokens` rows, in bytes that a rank receives.

        Rows and weights travel in the experts' dtype, or as the wire has them, the router's in its own, counts in four
        bytes.

        Args:
            dgrad: whether the input needs a gradient.
            routing: [blocks of rows, experts] as `counts()` gives them; or "balanced"; or a bound: the "most" and the
                "least" that the rank can receive, whatever is chosen.
            rank: default: this one; ranks receive different numbers of rows.

        Raises:
            LayoutError: counts that are not those of so many tokens.
        """
        rank = self.mesh.rank if rank is None else rank

        def run(x: Tensor, _: Any) -> Volume:
            return volume_of(_WithLosses(self), self.mesh, (x,), rank=rank)

        return self._dry(tokens, dgrad, routing, rank, run)  # type: ignore[no-any-return]

    def memory(
        self, tokens: int, dgrad: bool = True, backend: str | None = None, *, routing: Routes = "balanced"
    ) -> Memory:
        """Bytes that a forward and backward of `tokens` rows need beside input and parameters; see `ndtp.ops.memory`.

        Args:
            dgrad: whether the input needs a gradient.
            backend: "gloo" or "nccl"; default: that of the mesh.
            routing: as for `volume`.
        """
        run = lambda x, shape: memory_of(self, self.mesh, (x,), shape, backend)  # noqa: E731
        return self._dry(tokens, dgrad, routing, self.mesh.rank, run)

    def _dry(self, tokens: int, dgrad: bool, routing: Routes, rank: int, run: Callable[[Tensor, Any], Any]) -> Any:
        """Return what a run on rows without memory, of this routing, gives."""
        grid, plan = self.mesh.grid, self.plan
        shape = self.in_layout.shard_shape((tokens, self.hidden))
        here = plan.tokens.shard_shape((tokens, self.hidden))[0]
        table = self._table(routing, here, grid.size(plan.row_axes), rank)
        peers = grid.group(rank, plan.count_axes)
        margin = {"most": 1, "least": -1}.get(routing, 0) if isinstance(routing, str) else 0
        x = torch.empty(shape, dtype=self.experts.down_proj.dtype, device="meta", requires_grad=dgrad)
        routed, self.routing = self.routing, None
        self.experts.expected = [table[grid.index(peer, plan.row_axes)] for peer in peers], margin
        try:
            return run(x, shape)
        finally:
            self.routing, self.experts.expected = routed, ((), 0)

    def _table(self, routing: Routes, here: int, blocks: int, rank: int) -> Counts:
        choices = here * self.top_k
        if isinstance(routing, Tensor):
            routing = routing.tolist()
        if isinstance(routing, str):
            if routing == "balanced":
                return [_spread(choices, range(self.num_experts), self.num_experts)] * blocks
            if routing not in ("most", "least"):
                raise LayoutError(
                    f"MoE '{self.name}': routing={routing!r} is none of balanced, most, least, and no table of counts"
                )
            return self._bound(routing == "most", choices, blocks, rank)
        if len(routing) != blocks or any(len(row) != self.num_experts or sum(row) > choices for row in routing):
            raise LayoutError(
                f"MoE '{self.name}': routing has {len(routing)} blocks of rows; {blocks} are needed, each with at most "
                f"{choices} rows for {self.num_experts} experts"
            )
        return routing

    def _bound(self, most: bool, choices: int, blocks: int, rank: int) -> Counts:
        """Every block's rows where they are the most, or the least, for a rank: traffic is a sum over them."""
        plan, grid = self.plan, self.mesh.grid
        none = [0] * self.num_experts
        table = [none] * blocks
        if not most and self.router.drops:
            return table
        for peer in grid.group(rank, plan.count_axes):
            block, mine = grid.index(peer, plan.row_axes), plan.local_experts(self.num_experts, rank)
            away = (mine.stop + len(mine) - 1) % self.num_experts  # of the next rank along the experts' axes
            aims = [mine, range(away, away + 1)] if plan.ranks > 1 else [mine]
            own = plan.local_experts(self.num_experts, peer)
            aims += [own] if own != mine else []
            rows = [_spread(choices, aim, self.num_experts) for aim in aims]
            # So many that nothing is rounded where they are cut: what they cost is in proportion to them.
            many = [[count * self.experts.chunks * grid.num_ranks for count in row] for row in rows]
            alone = [[none] * block + [row] + [none] * (blocks - block - 1) for row in many]
            costs = [self._cost(self.experts.flows(each, plan.row_axes, rank)) for each in alone]
            best = max(costs) if most else min(costs)
            table = [*table[:block], rows[costs.index(best)], *table[block + 1 :]]
        return table

    def _cost(self, flows: Sequence[RowFlow]) -> int:
        """Return the bytes of the rows of an expert, whose parameters are trained."""
        width = 1 + self.experts.is_gated
        return sum(flow.volume(self.hidden, self.inner, width).total for flow in flows)

    def extra_repr(self) -> str:
        axes = " ".join(f"{axis}={self.mesh.grid[axis]}" for axis in self.plan.axes)
        return f"{self.hidden}, {self.inner}, experts={self.num_experts} over ({axes}), top_k={self.top_k}"


class _WithLosses(nn.Module):
    """A layer of experts and its losses, which have gradients as well, as one result."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).sum() + self.moe.aux_loss


def _way(source: Layout, target: Layout, name: str) -> BoundaryWay:
    try:
        return RelayoutPlan(source, target, name=name, kind="activations")
    except LayoutError:
        if source.grid != target.grid or source.ndim != target.ndim:
            raise
        return source, target, name


def _spread(choices: int, experts: range, count: int) -> list[int]:
    """Spread a number of rows over some of the experts as evenly as possible."""
    row = [0] * count
    for i, expert in enumerate(experts):
        row[expert] = choices * (i + 1) // len(experts) - choices * i // len(experts)
    return row


def _axes_of_experts(given: str | Sequence[str] | None, mesh: ProcessGrid) -> tuple[str, ...]:
    """Return the axes that split experts: the given ones, or `e` of a grid that has it."""
    if given is None:
        return ("e",) if "e" in mesh.grid else ()
    return (given,) if isinstance(given, str) else tuple(given)
