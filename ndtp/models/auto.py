"""`scheme="auto"`: the planner's answer for the Linear pairs of a model.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import SCHEMES, BlockLayouts
from ndtp.dtypes import SIZES
from ndtp.errors import LayoutError
from ndtp.planner.block_cost import AXES, Block, Grids, divides, volume
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import Request
from ndtp.planner.search import predict, search

# (hidden, inner, whether it is gated) of each pair.
Pairs = Sequence[tuple[int, int, bool]]


def request_for(pairs: Pairs, tokens: int, ranks: int, hardware: str | Hardware, dtype: str) -> Request:
    """What the planner is asked: all pairs on one grid, rows not split outside of them."""
    if not pairs:
        raise LayoutError("parallelize: scheme='auto' found no Linear pair to plan for; name them in plan=")
    profile = Hardware.load(hardware)
    if dtype not in SIZES or dtype not in profile.tflops:
        raise LayoutError(f"parallelize: scheme='auto' has no rate of {dtype} products on hardware {profile.name!r}")
    blocks = tuple(Block.mlp(tokens, hidden, inner, gated) for hidden, inner, gated in pairs)
    return Request(blocks, ranks, profile, dtype=dtype, fixed={"dp": 1})


def whole_request(blocks: Sequence[Block], ranks: int, hardware: str | Hardware, dtype: str) -> Request:
    """What the planner is asked of a whole model: all of its blocks on one grid.

    Raises:
        LayoutError: no rate of products of this dtype is known.
    """
    profile = Hardware.load(hardware)
    if dtype not in SIZES or dtype not in profile.tflops:
        raise LayoutError(f"parallelize: scheme='auto' has no rate of {dtype} products on hardware {profile.name!r}")
    return Request(tuple(blocks), ranks, profile, dtype=dtype, fixed={"dp": 1})


def best_grid(request: Request) -> Grid:
    """The grid for a model whose `dp` is 1."""
    best = search(request, limit=1)[0]
    return Grid({axis: best.grid[axis] for axis in best.grid if axis != "dp"})


def best_layouts(request: Request, grid: Grid, stays_split: bool = False) -> BlockLayouts:
    """The layouts on a grid that is given: each axis but `dp` plays x, y or z, so that the step takes least.

    Outside of a pair activations are whole, so that layouts which split them pay a gather at its end, and one in
    backward at its begin; 1D with whole activations does not.

    Args:
        stays_split: activations are not whole outside, but lie there as blocks take and leave them.

    Raises:
        LayoutError: too many axes, or none of their roles divides the heads.
    """
    axes = [axis for axis in grid.nontrivial(grid.names) if axis != "dp"]
    if len(axes) > 3:
        raise LayoutError(f"parallelize: scheme='auto' on grid {grid} has {len(axes)} axes to place; it takes 3")
    choices = []
    for roles in permutations("xyz", len(axes)):
        role_of = dict(zip(axes, roles, strict=True))
        kept = [axis for axis in grid if axis in role_of or axis == "dp"]
        renamed = Grid({role_of.get(axis, axis): grid[axis] for axis in kept} or {"x": 1})
        sizes = Grids(**(dict.fromkeys(AXES, 1) | dict(zip(renamed.names, renamed.shape, strict=True))))
        if not all(divides(block, sizes, request.pad) for block in request.blocks):
            continue
        choices.append((float(predict(request, renamed).total), roles))
    if not choices:
        heads = sorted({size for block in request.blocks for size in block.heads})
        raise LayoutError(f"parallelize: scheme='auto': no axis of grid {grid} divides {heads} heads")
    _, roles = min(choices)
    where = {role: (axis,) for axis, role in zip(axes, roles, strict=True)}
    if axes and not stays_split and _whole_is_cheaper(request, grid, where):
        return _placed(grid, "1d", (tuple(axes),))
    return _placed(grid, "3d", tuple(where.get(role, ()) for role in "xyz"))


def _whole_is_cheaper(request: Request, grid: Grid, where: Mapping[str, tuple[str, ...]]) -> bool:
    dp = grid["dp"] if "dp" in grid else 1
    x, y, z = (grid.size(where.get(role, ())) for role in "xyz")
    tensor = x * y * z
    split = Grids(dp, z, x, y)
    whole = sum(volume(block, Grids(dp, 1, 1, tensor)) for block in request.blocks)
    ends = sum(2 * block.tokens * block.hidden // dp * (tensor - 1) // tensor for block in request.blocks)
    return bool(whole <= sum(volume(block, split) for block in request.blocks) + ends)


def _placed(grid: Grid, scheme: str, roles: tuple[tuple[str, ...], ...]) -> BlockLayouts:
    """`block_layouts`, with any axes in any role."""
    used = {axis for axes in roles for axis in axes}
    rows = tuple(axis for axis in grid if axis not in used and grid[axis] > 1)
    layouts = SCHEMES[scheme](*roles)
    return BlockLayouts(*(Layout(grid, (rows if i % 2 == 0 else ()) + d[0], *d[1:]) for i, d in enumerate(layouts)))
