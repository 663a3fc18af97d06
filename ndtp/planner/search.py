"""`plan`: which grid a block should run on, searched among all of them, with reasons.  Pure.

plans = ndtp.plan(tokens=8192, hidden=4096, ffn=16384, ranks=64, hardware="h100-ib")    # print(plans): a table
best = plans[0]
mesh = ndtp.ProcessGrid(best.grid)
mlp = ndtp.nn.MLP(4096, 16384, mesh=mesh, **best.arguments)     # or ndtp.parallelize(model, mesh, best)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ndtp.algebra.grid import Grid
from ndtp.algebra.schemes import scheme_of
from ndtp.algebra.wire import Wire
from ndtp.errors import GridError
from ndtp.planner import block_cost
from ndtp.planner.block_cost import Block, Grids
from ndtp.planner.grid_plan import GridPlan
from ndtp.planner.grid_plans import GridPlans
from ndtp.planner.grids import FOLDED, PerGrid, grids_of
from ndtp.planner.hardware import Hardware
from ndtp.planner.refusals import explain_none
from ndtp.planner.request import GIB, Request, check_arguments
from ndtp.planner.time_model import EXPERT_ORDERS, ORDERS, BlockWork, Network, Time
from ndtp.schedule.clocks import LaneSpan

# A step predicted this near to the fastest one is as fast: the model errs by more.  Less memory is better then.
TIE = 0.01
WIRES = ("bf16", "fp8", "int8")  # whose savings are told

# Operands that backward gathers again, in the order in which they are tried against a memory limit.
REGATHERS: tuple[tuple[str, ...], ...] = ((), ("b",), ("a",), ("a", "b"))


def plan(
    tokens: int,
    hidden: int,
    ffn: int,
    ranks: int,
    hardware: str | Hardware = "h100-ib",
    *,
    gated: bool = False,
    experts: int | None = None,
    top_k: int = 2,
    shared: int = 0,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_size: int | None = None,
    layers: int = 1,
    dtype: str = "bfloat16",
    objective: str = "time",
    optimizer: str = "adamw",
    memory_limit_gib: float | None = None,
    fixed: Mapping[str, int] | None = None,
    tp_within_node: bool = False,
    pad: bool = True,
    chunks: int = 1,
    wire: Wire | str | Mapping[str, str | bool | None] | None = None,
    captured: bool = True,
    limit: int | None = None,
) -> GridPlans:
    """Grids for a block of `tokens` rows (of the whole job), best first.

    Every factorization of `ranks` into (dp, z, x, y) is weighed in every rank order; each grid is listed once, in its
    fastest order.  With experts it is (dp, e, z, x, y), and experts lie over e and over each choice of z, x and y
    besides.

    Args:
        hardware: a preset (`ndtp.planner.hardware.PRESETS`), a `.toml` file, or a `Hardware`.
        gated: an MLP with a gate beside its up projection.
        experts, top_k: so many MLPs of `ffn` features, of which a token goes through `top_k`, evenly: `ndtp.nn.MoE`.
        shared: features of an MLP beside them that every token goes through.
        heads, kv_heads, head_size: attention projections before the MLP, in the same grid.
        layers: how often the block is repeated.
        objective: "time", "volume" or "memory" of a training step, forward and backward.  Ties go to less memory;
            steps within a percent of the fastest are tied with it.
        optimizer: whose state counts as memory: adamw, momentum, sgd or none.
        memory_limit_gib: leave out what needs more on a rank; operands are gathered again in backward where that helps.
        fixed: sizes of axes that are given, such as `{"dp": 4}`.
        tp_within_node: x and y must not leave a node.
        pad: pad sizes that a grid does not divide, at its cost; otherwise such grids are left out.
        chunks: pieces of rows whose collectives run beside their products, as `MatMulPlan(chunks=)`.
        wire: the dtypes in which tensors travel, such as "bf16", see `ndtp.Wire`.
        captured: a graph issues the step (`ndtp.capture`); False: the host of the hardware issues it task by task.
        limit: how many to return; default all.

    Raises:
        GridError: an argument that is none of its kind; names what it may be.  No grid fulfils the constraints; names
            the nearest ones that would.
    """
    check_arguments(
        {"tokens": tokens, "hidden": hidden, "ffn": ffn},
        {"experts": experts, "heads": heads, "kv_heads": kv_heads, "head_size": head_size, "limit": limit},
    )
    blocks = mlp_or_experts(tokens, hidden, ffn, gated, experts or 0, top_k, shared)
    if heads:
        blocks.insert(0, Block.attention(tokens, hidden, heads, kv_heads, head_size))
    request = Request(
        tuple(blocks),
        ranks,
        Hardware.load(hardware),
        layers=layers,
        dtype=dtype,
        objective=objective,
        optimizer=optimizer,
        memory_limit_gib=memory_limit_gib,
        fixed=dict(fixed or {}),
        tp_within_node=tp_within_node,
        pad=pad,
        chunks=chunks,
        wire=Wire.of(wire),
        captured=captured,
    )
    return search(request, limit)


def mlp_or_experts(
    tokens: int, hidden: int, ffn: int, gated: bool, experts: int, top_k: int, shared: int
) -> list[Block]:
    if not experts:
        return [Block.mlp(tokens, hidden, ffn, gated)]
    beside = [replace(Block.mlp(tokens, hidden, shared, gated), name="shared expert")] if shared else []
    return [Block.moe(tokens, hidden, ffn, experts, top_k, gated), *beside]


def untied(seconds: PerGrid, least: PerGrid) -> PerGrid:
    """Nothing for steps that are tied with the fastest one, for others what they take."""
    return np.where(seconds <= least * (1 + TIE), 0.0, seconds)


@dataclass(frozen=True)
class Candidates:
    """Everything that is known of the grids that a request allows, as arrays."""

    g: Grids
    order: PerGrid
    regather: PerGrid
    volume: PerGrid
    memory: PerGrid
    time: Time

    def ranked(self, objective: str) -> PerGrid:
        """Indices, best first."""
        time, folded = self.time.total, []
        if not isinstance(self.g.fold, int):  # many are as fast to the last bits: the plainest of them comes first
            time, folded = np.round(time / time.min(), 9), [sum(self.g.fold >> bit & 1 for bit in FOLDED.values())]
        keys = {
            "time": (self.volume, time, self.memory, untied(time, time.min())),
            "volume": (time, self.memory, self.volume),
            "memory": (time, self.volume, self.memory),
        }[objective]
        return np.lexsort((*folded, *keys))


def search(request: Request, limit: int | None = None) -> GridPlans:
    """The ranked grids of a request.

    Raises:
        GridError: there is none.
    """
    found, bound = candidates(request), request.bound
    even = np.logical_and.reduce([block_cost.divides(block, found.g, pad=False) for block in request.blocks])
    chosen = found.ranked(request.objective)[:limit]
    return GridPlans(_grid_plan(request, found, int(i), not even[i], bound) for i in chosen)


def candidates(request: Request) -> Candidates:
    g = Grids.all(request.ranks, request.has_experts)
    keep = np.ones(g.ranks.shape, dtype=bool)
    for axis, size in request.fixed.items():
        keep &= getattr(g, axis) == size
    if not keep.any():
        raise GridError(explain_none(request, "fixed"))
    for block in request.blocks:
        keep &= block_cost.divides(block, g, request.pad)
    if not keep.any():
        raise GridError(explain_none(request, "sizes"))
    g = g.take(keep)
    if block_cost.largest_integer(request.blocks, request.ranks, request.layers) >= 2**63:
        g = g.unbounded()
    variant, volumes, memories = _with_regather(request, g)
    if request.memory_limit_gib is not None:
        fits = memories <= request.memory_limit_gib * GIB
        if not fits.any():
            raise GridError(explain_none(request, "memory", float(memories.min())))
        g, variant, volumes, memories = g.take(fits), variant[fits], volumes[fits], memories[fits]
    order, time = _fastest_order(request, g, variant)
    if request.tp_within_node:
        inside = order >= 0
        if not inside.any():
            raise GridError(explain_none(request, "node"))
        g, order, variant, volumes, memories = (
            g.take(inside), order[inside], variant[inside], volumes[inside], memories[inside],
        )  # fmt: skip
        time = _take_time(time, inside)
    return Candidates(g, order, variant, volumes, memories, time)


def _costs(request: Request, g: Grids, regather: Sequence[str]) -> tuple[object, object]:
    """Volume and memory in bytes of all layers.  Only one block at a time works on temporary operands."""
    a, b = int("a" in regather), int("b" in regather)
    parts = [block_cost.memory(bl, g, request.itemsize, request.optimizer, a, b) for bl in request.blocks]
    times = [block.times for block in request.blocks]
    kept = sum(n * (part.total - part.working) for n, part in zip(times, parts, strict=True)) * request.layers
    volume = sum(bl.times * block_cost.num_bytes(bl, g, request.itemsize, a, b, request.wire) for bl in request.blocks)
    return volume * request.layers, kept + np.maximum.reduce([part.working for part in parts])


def _with_regather(request: Request, g: Grids) -> tuple[PerGrid, PerGrid, PerGrid]:
    """Return, for each grid, the first index into REGATHERS that fits into memory, or the one that needs the least."""
    volumes, memories = (np.stack(rows) for rows in zip(*(_costs(request, g, r) for r in REGATHERS), strict=True))
    least = memories.argmin(0)  # of equals the first, which moves the least
    if request.objective == "memory":
        variant = least
    elif request.memory_limit_gib is None:
        variant = np.zeros_like(least)
    else:
        fits = memories <= request.memory_limit_gib * GIB
        ordered = np.where(fits, volumes, volumes.max() + 1)
        variant = np.where(fits.any(0), ordered.argmin(0), least)
    each = np.arange(len(variant))
    return variant, volumes[variant, each], memories[variant, each]


def _fastest_order(request: Request, g: Grids, variant: object) -> tuple[PerGrid, Time]:
    """Return, for each grid, the index into ORDERS of its fastest order (-1: none is allowed), and its time."""
    work = _work(request, g, regather_a=_mask("a", variant), regather_b=_mask("b", variant))
    lies = g.bounded()
    best_order = np.full(g.ranks.shape, -1)
    best = Time(*(np.full(g.ranks.shape, np.inf) for _ in range(4)))
    one_node = request.ranks <= request.hardware.ranks_per_node
    orders = orders_of(request)
    for index, order in enumerate(orders[:1] if one_node else orders):
        network = Network.of(lies, order, request.hardware)
        time = work.time(network)
        # A tie within rounding keeps the earlier order.
        better = time.total < best.total * (1 - 1e-9) if index else np.ones(g.ranks.shape, dtype=bool)
        if request.tp_within_node:
            better = network.inside_node(("x", "y")) & ((best_order < 0) | better)
        best_order = np.where(better, index, best_order)
        best = _select(better, time, best)
    return best_order, best


def orders_of(request: Request) -> tuple[tuple[str, ...], ...]:
    return EXPERT_ORDERS if request.has_experts else ORDERS


def _mask(operand: str, variant: PerGrid) -> object:
    return np.array([operand in regather for regather in REGATHERS], dtype=np.int64)[variant]


def _parts(time: Time) -> tuple[PerGrid, PerGrid, PerGrid, PerGrid]:
    return time.total, time.gemm, time.elementwise, time.communication


def _select(mask: PerGrid, one: Time, other: Time) -> Time:
    return Time(*(np.where(mask, a, b) for a, b in zip(_parts(one), _parts(other), strict=True)))


def _take_time(time: Time, index: PerGrid) -> Time:
    return Time(*(part[index] for part in _parts(time)))


def _grid_plan(request: Request, found: Candidates, i: int, pad: bool, bound: float) -> GridPlan:
    grid = Grid({axis: int(getattr(found.g, axis)[i]) for axis in orders_of(request)[int(found.order[i])]})
    expert_axis = axes_of_experts(grid, int(found.g.fold[i])) if request.has_experts else None
    volume = int(found.volume[i])
    return GridPlan(
        grid=grid,
        scheme=scheme_of(grid),
        kind=kind_of(grid, expert_axis),
        regather=REGATHERS[int(found.regather[i])],
        pad=bool(pad),
        volume_bytes=volume,
        memory_bytes=int(found.memory[i]),
        bound_ratio=volume / bound if bound > 0 else 1.0,
        step_ms=float(found.time.total[i]) * 1e3,
        gemm_ms=float(found.time.gemm[i]) * 1e3,
        exposed_ms=float(found.time.exposed[i]) * 1e3,
        comm_ms=float(found.time.communication[i]) * 1e3,
        request=request,
        expert_axis=expert_axis,
    )


def axes_of_experts(grid: Grid, fold: int) -> tuple[str, ...]:
    """Return the axes in the order in which a `ProcessGrid` has its parameters: the ranks' order, but z last."""
    split = {"e": grid["e"] > 1, **{axis: bool(fold >> FOLDED[axis] & 1) for axis in FOLDED}}
    return tuple(sorted((axis for axis in grid if split.get(axis)), key="z".__eq__))


def predict(request: Request, grid: Grid, expert_axis: Sequence[str] = ()) -> Time:
    """The time of a step on one grid, in the order in which it is given."""
    work, network = work_on(request, grid, expert_axis)
    return work.time(network)


def _work(request: Request, g: Grids, **again: object) -> BlockWork:
    """Return the work of a request's blocks on these grids."""
    return BlockWork.of(
        request.blocks, g, request.hardware, request.dtype, layers=request.layers, chunks=request.chunks,
        wire=request.wire, captured=request.captured, **again,
    )  # fmt: skip


def wire_savings(plan: GridPlan) -> list[dict[str, float | int | str | None]]:
    """Return what a step on a plan's grid receives and takes as it computes, and in each dtype that has fewer bytes."""
    found, g = [], grids_of(plan.grid, plan.expert_axis or ())
    for name in (None, *WIRES):
        if name is not None and Wire.of(name).format("weights").itemsize >= plan.request.itemsize:  # type: ignore[union-attr]
            continue
        wire = Wire.of(name)
        request = replace(plan.request, wire=wire)
        a, b = int("a" in plan.regather), int("b" in plan.regather)
        each = (bl.times * int(block_cost.num_bytes(bl, g, request.itemsize, a, b, wire)) for bl in request.blocks)
        volume = sum(each) * request.layers
        seconds = predict(request, plan.grid, plan.expert_axis or ()).total
        found.append({"wire": name, "volume_bytes": volume, "step_ms": float(seconds) * 1e3})
    return found


def weigh(request: Request, g: Grids, order: Sequence[str]) -> tuple[PerGrid, PerGrid, PerGrid]:
    """Return each grid's seconds of a step, and its memory and volume in bytes, with its axes in this order on the
    ranks.
    """
    order = (*(axis for axis in request.axes if axis not in order), *order)
    work = _work(request, g)
    volumes, memories = _costs(request, g, ())
    return work.time(Network.of(g, order, request.hardware)).total, memories, volumes


def timeline(request: Request, grid: Grid, product: int | None = None) -> list[LaneSpan]:
    """Return the spans of computation and communication in a step of one layer, or of one product, on one grid."""
    work, network = work_on(request, grid)
    return work.spans(network, product)


def work_on(request: Request, grid: Grid, expert_axis: Sequence[str] = ()) -> tuple[BlockWork, Network]:
    """The work of a request on one grid, and the grid's links, in the order in which the axes are given."""
    order = (*(axis for axis in request.axes if axis not in grid), *grid.names)
    g = grids_of(grid, expert_axis)
    work = _work(request, g)
    return work, Network.of(g, order, request.hardware)


def kind_of(grid: Grid, expert_axis: Sequence[str] | None = None) -> str:
    """Return the field's name for a grid of dp, x, y and z, and of e, which is data parallel except for experts."""
    split = [axis for axis in ("x", "y") if grid[axis] > 1]
    parts = ["1D" if len(split) == 1 else "2D"] if split else []
    if grid["z"] > 1:
        parts = ["3D"] if len(split) == 2 else [*parts, "FSDP"]
    if grid["dp"] > 1 or ("e" in grid and grid["e"] > 1):
        parts.append("data parallel")
    if expert_axis:
        parts.append("expert parallel")
    return " + ".join(parts) or "one rank"
