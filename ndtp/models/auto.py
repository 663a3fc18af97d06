"""`scheme="auto"`: the planner's answer for pairs of Linears or the blocks of a whole model.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations, permutations
from typing import Any

import numpy as np

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout, default_mesh_axes
from ndtp.algebra.schemes import SCHEMES, BlockLayouts
from ndtp.algebra.wire import Wire
from ndtp.dtypes import SIZES
from ndtp.errors import LayoutError
from ndtp.planner.block_cost import Block, divides, volume
from ndtp.planner.grids import FOLDED, Grids, grids_of
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import Request
from ndtp.planner.search import search, untied, weigh

# Axes along which ranks are given rows of their own: `e` where there are experts, which it splits.
DATA = ("dp", "e")
# (hidden, inner, whether it is gated) of each pair.
Pairs = Sequence[tuple[int, int, bool]]


def request_for(
    pairs: Pairs, tokens: int, ranks: int, hardware: str | Hardware, dtype: str, wire: Wire | None = None
) -> Request:
    """Return the planner's request for all pairs on one grid, with rows that are not split outside of them."""
    if not pairs:
        raise LayoutError("parallelize: scheme='auto' found no Linear to plan for; name layers in plan=")
    blocks = [Block.mlp(tokens, hidden, inner, gated) for hidden, inner, gated in pairs]
    return whole_request(blocks, ranks, hardware, dtype, wire)


def whole_request(
    blocks: Sequence[Block], ranks: int, hardware: str | Hardware, dtype: str, wire: Wire | None = None
) -> Request:
    """Return the planner's request for a whole model: all blocks on one grid, on which no axis has rows of its own.

    Raises:
        LayoutError: no rate of products of this dtype is known.
    """
    profile = Hardware.load(hardware)
    if dtype not in SIZES or dtype not in profile.tflops:
        raise LayoutError(f"parallelize: scheme='auto' has no rate of {dtype} products on hardware {profile.name!r}")
    own_rows = DATA if any(block.experts for block in blocks) else DATA[:1]
    fixed = dict.fromkeys(own_rows, 1)
    return Request(tuple(blocks), ranks, profile, dtype=dtype, fixed=fixed, wire=wire)


@dataclass(frozen=True)
class Choice:
    """The choice of how a model lies on a grid.

    Attributes:
        grid: axes of the process grid.
        layouts: of its blocks.
        experts: the axes that split its experts.
        sizes: the same as the planner has it.
    """

    grid: Grid
    layouts: BlockLayouts
    experts: tuple[str, ...]
    sizes: Grids


def best_grid(request: Request) -> Grid:
    """The grid for a model whose `dp` is 1."""
    return _without_data(search(request, limit=1)[0].grid)


def _without_data(grid: Grid) -> Grid:
    return Grid({axis: grid[axis] for axis in grid if axis not in DATA})


def best_of_all_grids(request: Request, experts: Sequence[str] | None = None) -> Choice:
    """The planner's answer.

    Args:
        experts: the axes of experts, where they are given.

    Raises:
        LayoutError: experts lie over these axes in no answer.
    """
    given = None if experts is None or not request.has_experts else set(experts)
    plans = search(request, limit=1 if given is None else None)
    plan = next((plan for plan in plans if given in (None, set(plan.expert_axis or ()))), None)
    if plan is None:
        raise LayoutError(
            f"parallelize: scheme='auto' and no mesh: no grid of {request.ranks} ranks has experts over "
            f"{' '.join(experts or ())}\n  fix: some of x, y and z; or leave expert_axis out, which is planned then"
        )
    grid = _without_data(plan.grid)
    roles = tuple(grid.nontrivial((axis,)) for axis in "xyz")
    return Choice(grid, _placed(grid, "3d", roles), plan.expert_axis or (), grids_of(plan.grid, plan.expert_axis))


def best_on_grid(request: Request, grid: Grid, experts: Sequence[str] | None = None) -> Choice:
    """Return the choice with the fastest step on a given grid: the roles of its axes, and the axes that split
    experts.

    Where there are experts, `e` splits rows as `dp` does, and experts besides; further ones may split these, too.

    Args:
        experts: the axes of experts, where they are given.

    Raises:
        LayoutError: too many axes, or none of their roles divides the heads and the experts.
    """
    data = DATA if request.has_experts else DATA[:1]
    axes = [axis for axis in grid.nontrivial(grid.names) if axis not in data]
    if len(axes) > 3:
        raise LayoutError(f"parallelize: scheme='auto' on grid {grid} has {len(axes)} axes to place; it takes 3")
    over = _over(grid, experts) if request.has_experts else [()]
    weighed = [
        option
        for roles in permutations("xyz", len(axes))
        for option in _weighed(request, grid, dict(zip(axes, roles, strict=True)), over)
    ]
    if not weighed:
        heads = sorted({size for block in request.blocks for size in block.heads})
        counts = sorted({block.experts for block in request.blocks if block.experts})
        what = " and ".join([f"{heads} heads"] * bool(heads) + [f"{counts} experts"] * bool(counts))
        raise LayoutError(f"parallelize: scheme='auto': no axis of grid {grid} divides {what}")
    least = min(option.seconds for option in weighed)
    best = min(weighed, key=lambda option: option.rank(least))
    where = tuple(tuple(axis for axis in axes if best.role_of[axis] == role) for role in "xyz")
    return Choice(grid, _placed(grid, "3d", where), best.experts, best.sizes)


@dataclass(frozen=True)
class _Option:
    role_of: Mapping[str, str]
    experts: tuple[str, ...]
    sizes: Grids
    seconds: float
    memory: int
    volume: int

    def rank(self, least: float) -> tuple[Any, ...]:
        """Return a key as in the planner's answer: among tied options the least memory comes first, then the least
        time.
        """
        time = round(self.seconds / least, 9)  # many are as fast to the last bits
        places = len(self.experts), tuple(self.role_of.values()), self.experts
        return float(untied(time, 1.0)), self.memory, time, self.volume, *places


def _weighed(
    request: Request, grid: Grid, role_of: Mapping[str, str], over: Sequence[tuple[str, ...]]
) -> Iterator[_Option]:
    """Yield an option for each choice of the axes that split experts, with axes in these roles, where sizes allow
    it.
    """
    sizes = _as_planned(grid, role_of, over)
    fits = np.logical_and.reduce([divides(block, sizes, request.pad) for block in request.blocks])
    data = [axis for axis in DATA if axis in grid and axis not in role_of]
    order: list[str] = []  # ranks of dp that split experts are the planner's e, at the same place
    for axis in grid:
        order += [role_of[axis]] if axis in role_of else () if axis not in data else [axis] if data == [*DATA] else DATA
    order = [axis for axis in order if axis in request.axes]
    for i, (seconds, memory, moved) in enumerate(zip(*weigh(request, sizes, order), strict=True)):
        if fits[i]:
            one = Grids(*(int(size) for size in astuple(sizes.take(i))))
            yield _Option(role_of, over[i], one, float(seconds), int(memory), int(moved))


def _over(grid: Grid, experts: Sequence[str] | None) -> list[tuple[str, ...]]:
    """Return the axes that may split experts: the given ones, or `e` with each choice of others."""
    axes = grid.nontrivial(default_mesh_axes(grid))
    if experts is not None:
        return [tuple(axis for axis in axes if axis in experts)]
    others = [axis for axis in axes if axis != "e"]
    chosen = [set(some) for count in range(len(others) + 1) for some in combinations(others, count)]
    return [tuple(axis for axis in axes if axis == "e" or axis in some) for some in chosen]


def _as_planned(grid: Grid, role_of: Mapping[str, str], over: Sequence[tuple[str, ...]]) -> Grids:
    """A grid as the planner names its axes, for each choice of those that split experts."""
    data = [axis for axis in grid if axis in DATA and axis not in role_of]
    sizes = dict.fromkeys("zxy", 1) | {role: grid[axis] for axis, role in role_of.items()}
    rows = []
    for some in over:
        with_experts = grid.size([axis for axis in data if axis in some])
        fold = sum(1 << FOLDED[role] for axis, role in role_of.items() if axis in some)
        rows.append((grid.size(data) // with_experts, *(sizes[role] for role in "zxy"), with_experts, fold))
    columns = np.array(rows, dtype=np.int64).T
    return Grids(*columns) if any(over) else Grids(*columns[:4])


def best_layouts(request: Request, grid: Grid) -> BlockLayouts:
    """The layouts of pairs of Linears on a grid that is given: those of `best_on_grid`, or 1D.

    Outside of a pair activations are whole, so that layouts which split them pay a gather at its end, and one in
    backward at its begin; 1D with whole activations does not.

    Raises:
        LayoutError: too many axes.
    """
    best = best_on_grid(request, grid)
    axes = [axis for axis in grid.nontrivial(grid.names) if axis != "dp"]
    if axes and _whole_is_cheaper(request, best.sizes):
        return _placed(grid, "1d", (tuple(axes),))
    return best.layouts


def _whole_is_cheaper(request: Request, split: Grids) -> bool:
    tensor = split.x * split.y * split.z
    whole = sum(volume(block, Grids(split.dp, 1, 1, tensor)) for block in request.blocks)
    ends = sum(2 * block.tokens * block.hidden // split.dp * (tensor - 1) // tensor for block in request.blocks)
    return bool(whole <= sum(volume(block, split) for block in request.blocks) + ends)


def _placed(grid: Grid, scheme: str, roles: tuple[tuple[str, ...], ...]) -> BlockLayouts:
    """`block_layouts`, with any axes in any role."""
    used = {axis for axes in roles for axis in axes}
    rows = tuple(axis for axis in grid if axis not in used and grid[axis] > 1)
    layouts = SCHEMES[scheme](*roles)
    return BlockLayouts(*(Layout(grid, (rows if i % 2 == 0 else ()) + d[0], *d[1:]) for i, d in enumerate(layouts)))
