"""Several blocks in sequence, each on the grid that suits it, with the relayout between grids that differ.  Pure.

A plan only.  What runs it: the modules of each block on a `ProcessGrid` of its own, and between two of them
`ndtp.reshard`, which receives on each rank what `relayout_elements` counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import block_layouts
from ndtp.errors import GridError, LayoutError
from ndtp.planner.block_cost import Block
from ndtp.planner.grid_plan import GridPlan
from ndtp.planner.request import Request
from ndtp.planner.search import search


@dataclass(frozen=True)
class GridSequence:
    """A grid for each block.

    Attributes:
        relayout_bytes: received between each block and the next, forward and backward, by the rank that receives most.
        volume_bytes, step_ms: of all blocks and relayouts.
    """

    plans: tuple[GridPlan, ...]
    relayout_bytes: tuple[int, ...]
    volume_bytes: int
    step_ms: float


def plan_sequence(blocks: Sequence[Block], request: Request, candidates: int = 12) -> GridSequence:
    """The cheapest sequence of grids for blocks that follow one another, by dynamic programming.

    Args:
        blocks: each a `ndtp.planner.Block`.
        request: a `ndtp.planner.Request` with everything but the blocks, of which it may have none; its objective is
            "time" or "volume".
        candidates: how many grids of each block, best first, are considered, for all blocks.

    Raises:
        GridError: no blocks, another objective, or blocks of different tokens or hidden sizes.
    """
    if not blocks or request.objective not in ("time", "volume"):
        raise GridError("plan_sequence: give blocks, and a request by time or volume")
    if len({(block.tokens, block.hidden) for block in blocks}) > 1:
        raise GridError("plan_sequence: blocks that follow one another have the same tokens and hidden size")
    shape = blocks[0].tokens, blocks[0].hidden
    # Only grids that divide every size: what lies between two blocks has no padding of either.
    every = [search(replace(request, blocks=(block,), pad=False)) for block in blocks]
    shared = {_key(each.grid) for found in every for each in found[:candidates]}
    options = [[each for each in found if _key(each.grid) in shared] for found in every]
    best: list[tuple[float, tuple[GridPlan, ...], tuple[int, ...]]]
    best = [(_cost(each, request), (each,), ()) for each in options[0]]
    for found in options[1:]:
        longer = []
        for each in found:
            moved = [_between(path[-1], each, shape, request) for _, path, _ in best]
            total = [
                cost + (_relayout_ms(move, request) if request.objective == "time" else float(move))
                for (cost, _, _), move in zip(best, moved, strict=True)
            ]
            i = int(np.argmin(total))
            longer.append((total[i] + _cost(each, request), (*best[i][1], each), (*best[i][2], moved[i])))
        best = longer
    _, plans, moves = min(best, key=lambda entry: entry[0])
    return GridSequence(
        plans,
        moves,
        sum(each.volume_bytes for each in plans) + sum(moves),
        sum(each.step_ms for each in plans) + sum(_relayout_ms(move, request) for move in moves),
    )


def _key(grid: Grid) -> tuple[tuple[str, int], ...]:
    return tuple(zip(grid.names, grid.shape, strict=True))


def _cost(plan: GridPlan, request: Request) -> float:
    return plan.step_ms if request.objective == "time" else float(plan.volume_bytes)


def _between(one: GridPlan, other: GridPlan, shape: tuple[int, int], request: Request) -> int:
    """Return the bytes of a relayout from one plan's layout to the other's in forward, and back in backward."""
    source, target = (block_layouts(each.grid, each.scheme).output for each in (one, other))
    elements = relayout_elements(source, target, shape) + relayout_elements(target, source, shape)
    return elements * request.itemsize


def _relayout_ms(moved: int, request: Request) -> float:
    """Return the milliseconds of two all-to-alls over all ranks, over the slowest link that they need."""
    if not moved:
        return 0.0
    hardware = request.hardware
    link = hardware.inter if request.ranks > hardware.ranks_per_node else hardware.intra
    fixed = 2 * (link.latency_us + (request.ranks - 1) * link.hop_us) * 1e-6
    return (moved * link.seconds_per_byte("all_to_all", request.ranks) + fixed) * 1e3


def relayout_elements(source: Layout, target: Layout, shape: Sequence[int]) -> int:
    """Elements that some rank lacks of its shard in `target` when it holds its shard in `source`: the most of any rank.

    The layouts may lie on different grids of the same ranks.

    Raises:
        LayoutError: grids of different numbers of ranks, or sizes that do not divide.
    """
    if source.grid.num_ranks != target.grid.num_ranks:
        raise LayoutError(f"relayout: grid {source.grid} and grid {target.grid} have different numbers of ranks")
    exact: Any = object if math.prod(shape) >= 2**63 else np.int64
    kept: Any = 1
    for dim in range(len(shape)):
        (a, length_a), (b, length_b) = (_extent(layout, dim, shape, exact) for layout in (source, target))
        kept = kept * np.maximum(0, np.minimum(a + length_a, b + length_b) - np.maximum(a, b))
    return int(np.max(math.prod(target.shard_shape(shape)) - kept))


def _extent(layout: Layout, dim: int, shape: Sequence[int], dtype: Any) -> tuple[Any, int]:
    """Return the starts of the shards of all ranks in a dim, and the shards' length."""
    grid, length = layout.grid, layout.shard_shape(shape)[dim]
    rank = np.arange(grid.num_ranks).astype(dtype)
    index = np.zeros_like(rank)
    for axis in layout.dims[dim]:
        stride = grid.size(grid.names[grid.names.index(axis) + 1 :])
        index = index * grid[axis] + rank // stride % grid[axis]
    return index * length, length
