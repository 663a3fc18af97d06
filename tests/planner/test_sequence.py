"""Grids that differ from block to block, and what it takes to get from one to the other."""

import itertools

import numpy as np
import pytest

from ndtp import Grid, GridError, Layout, LayoutError
from ndtp.algebra.schemes import block_layouts
from ndtp.planner.block_cost import Block
from ndtp.planner.hardware import Hardware, Link
from ndtp.planner.request import Request
from ndtp.planner.search import search
from ndtp.planner.sequence import plan_sequence, relayout_elements

LINK = Link(1.0, 0.0, 0.0)
MACHINE = Hardware("flat", 64, LINK, LINK, {"float32": 1e6}, gemm_half=0.0, memory_gbs=1e9, launch_us=0.0)
ONE, OTHER = Grid(z=2, x=2, y=3), Grid(y=4, x=3)
LAYOUTS = [
    Layout(ONE, ("z", "y"), "x"), Layout(ONE, "x", ("y", "z")), Layout(ONE, None, None),
    Layout(OTHER, "y", "x"), Layout(OTHER, ("x", "y"), None), Layout(OTHER, None, "x"),
]  # fmt: skip


@pytest.mark.parametrize("source, target", list(itertools.product(LAYOUTS, LAYOUTS)), ids=str)
def test_relayout_counts_what_a_rank_lacks(source, target):
    """Against sets of elements."""
    shape = (24, 24)
    numbers = np.arange(24 * 24).reshape(shape)
    lacking = [
        len(set(target.shard(numbers, rank).flat) - set(source.shard(numbers, rank).flat))
        for rank in range(source.grid.num_ranks)
    ]
    assert relayout_elements(source, target, shape) == max(lacking)


def request(ranks, objective="volume"):
    return Request((), ranks, MACHINE, dtype="float32", objective=objective)


def test_equal_blocks_share_one_grid():
    blocks = [Block.mlp(8192, 1024, 4096)] * 3
    found = plan_sequence(blocks, request(16))
    assert len({each.grid for each in found.plans}) == 1
    assert found.relayout_bytes == (0, 0)
    assert (
        found.volume_bytes
        == 3 * search(Request((blocks[0],), 16, MACHINE, dtype="float32", objective="volume"))[0].volume_bytes
    )


@pytest.mark.parametrize("objective", ["volume", "time"])
def test_never_worse_than_the_best_single_grid(objective):
    """A wide block between narrow ones; on one grid all of them cost what they cost together."""
    blocks = [Block.mlp(4096, 1024, 512), Block.mlp(4096, 1024, 32768), Block.mlp(4096, 1024, 512)]
    found = plan_sequence(blocks, request(16, objective), candidates=1000)
    single = search(Request(tuple(blocks), 16, MACHINE, dtype="float32", objective=objective, pad=False))[0]
    if objective == "volume":
        assert found.volume_bytes <= single.volume_bytes
        assert found.volume_bytes == sum(p.volume_bytes for p in found.plans) + sum(found.relayout_bytes)
    else:
        # Blocks that are planned one by one do not hide each other's collectives.
        alone = [
            next(p for p in search(Request((b,), 16, MACHINE, dtype="float32", pad=False)) if p.grid == single.grid)
            for b in blocks
        ]
        assert found.step_ms <= sum(each.step_ms for each in alone) * (1 + 1e-9)


def test_changes_grid_where_that_pays():
    """Gather the narrow block's weights over z, the wide one's activations over y: between them the layout is one."""
    blocks = [Block.mlp(65536, 256, 256), Block.mlp(65536, 256, 2**20)]
    found = plan_sequence(blocks, request(16), candidates=1000)
    assert [each.grid.nontrivial(each.grid.names) for each in found.plans] == [("z",), ("y",)]
    assert found.relayout_bytes == (0,)
    single = search(Request(tuple(blocks), 16, MACHINE, dtype="float32", objective="volume", pad=False))[0]
    assert found.volume_bytes < single.volume_bytes


def test_relayouts_are_charged():
    """Two blocks that would be best on grids with different splits of rows and features stay on one when moving costs
    more than it saves."""
    blocks = [Block.mlp(4096, 4096, 64), Block.mlp(4096, 4096, 2**18)]
    alone = [search(Request((b,), 16, MACHINE, dtype="float32", objective="volume", pad=False))[0] for b in blocks]
    found = plan_sequence(blocks, request(16), candidates=1000)
    layouts = [block_layouts(each.grid, each.scheme).output for each in alone]
    moves = 4 * sum(relayout_elements(*pair, (4096, 4096)) for pair in (layouts, layouts[::-1]))
    assert moves > 0
    assert found.volume_bytes <= sum(each.volume_bytes for each in alone) + moves
    assert found.volume_bytes > sum(each.volume_bytes for each in alone)


def test_refusals():
    with pytest.raises(GridError, match="same tokens"):
        plan_sequence([Block.mlp(64, 8, 8), Block.mlp(64, 16, 8)], request(2))
    with pytest.raises(GridError, match="by time or volume"):
        plan_sequence([Block.mlp(64, 8, 8)], request(2, "memory"))
    with pytest.raises(LayoutError, match="different numbers of ranks"):
        relayout_elements(Layout(Grid(x=2), "x"), Layout(Grid(x=4), "x"), (8,))
