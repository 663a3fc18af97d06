"""Who sends which rows to whom: simulated on all ranks at once, on every small grid, for random counts."""

import random

import pytest

from ndtp import Grid, Layout, LayoutError
from ndtp.algebra.expert_plan import expert_plan
from ndtp.algebra.row_flow import RowFlow, RowMove, chunk_counts, even_split, sorting_index
from ndtp.algebra.schemes import BlockLayouts, block_layouts

EXPERTS = 4


def moved(rows, flows, pick):
    """Every rank's rows behind a move; of a reduce-scatter, those that it keeps, which all must agree on."""
    result = []
    for rank, flow in enumerate(flows):
        move = pick(flow)
        peers = flow.plan.grid.group(rank, move.axes)
        arrived = []
        for i, peer in enumerate(peers):
            theirs = pick(flows[peer])
            assert theirs.axes == move.axes and len(rows[peer]) == theirs.before
            to = theirs.sends
            start = 0 if move.kind == "all_gather" else sum(to[: move.me])
            part = rows[peer][start : start + to[move.me]]
            assert len(part) == move.receives[i]
            arrived.append(part)
        if move.kind == "reduce_scatter":
            assert all(part == arrived[0] for part in arrived)
            arrived = arrived[:1]
        result.append([row for part in arrived for row in part])
        assert len(result[-1]) == move.after and move.back.back == move
    return result


def row_moves(way):
    return [i for i, move in enumerate(way) if isinstance(move, RowMove)]


def check(grid, scheme, expert_axes, seed):
    plan = expert_plan(block_layouts(grid, scheme), expert_axes)
    draw, blocks = random.Random(seed), grid.size(plan.row_axes)
    counts = [[draw.choice((0, 0, 1, 3, 8)) for _ in range(EXPERTS)] for _ in range(blocks)]
    flows = [RowFlow(plan, rank, counts, plan.row_axes) for rank in range(grid.num_ranks)]
    names = [f"{axis}={grid[axis]}" for axis in grid]
    sent = [
        [(grid.index(rank, plan.row_axes), e, i) for e in range(EXPERTS) for i in range(flow.held_by(rank)[e])]
        for rank, flow in enumerate(flows)
    ]
    rows = moved(sent, flows, lambda flow: flow.dispatch)
    for i in row_moves(flows[0].ways[0].there):
        rows = moved(rows, flows, lambda flow, i=i: flow.ways[0].there[i])
    here = []
    for rank, flow in enumerate(flows):
        index = [start + i for start, count in sorting_index(flow.segments) for i in range(count)]
        ordered = [rows[rank][i] for i in index]
        mine = plan.local_experts(EXPERTS, rank)
        wanted = [e for e, size in zip(mine, flow.sizes, strict=True) for _ in range(size)]
        assert [row[1] for row in ordered] == wanted, names
        here.append(ordered)
    between = here
    for way in (1, 2):
        for i in row_moves(flows[0].ways[way].there):
            between = moved(between, flows, lambda flow, way=way, i=i: flow.ways[way].there[i])
    assert between == here  # scattered and gathered again
    for i in row_moves(flows[0].ways[3].there):
        rows = moved(rows, flows, lambda flow, i=i: flow.ways[3].there[i])
    assert moved(rows, flows, lambda flow: flow.combine) == sent
    return flows


def test_every_row_comes_to_its_expert_and_back():
    for grid in (*Grid.all(4, ("e", "z", "x", "y")), Grid(e=2, z=2, x=2, y=2), Grid(dp=2, y=2, e=2)):
        check(grid, "3d", ("e",), seed=grid.num_ranks)
    for scheme in ("1d", "1d-sp", "2d", "2d-features"):
        check(Grid(e=2, x=2, y=2), scheme, ("e",), seed=1)
    check(Grid(z=2, x=2, y=2), "3d", ("z", "y"), seed=2)
    check(Grid(x=2, y=2), "3d", (), seed=3)


def test_a_chunk_is_a_part_of_every_expert():
    counts = [[5, 0, 1, 8], [2, 2, 7, 0]]
    parts = [chunk_counts(counts, i, 3) for i in range(3)]
    for block, row in enumerate(counts):
        assert [sum(part[block][e] for part in parts) for e in range(4)] == row
    assert even_split(8, 3) == (2, 3, 3)


def test_plans_that_cannot_be_are_refused():
    with pytest.raises(LayoutError, match="does not name axes"):
        expert_plan(block_layouts(Grid(x=2), "3d"), ("e",))
    grid, rows = Grid(e=2, x=2), Layout(Grid(e=2, x=2), "e", None)
    weight, hidden = Layout(grid, None, None), Layout(grid, ("e", "x"), None)
    with pytest.raises(LayoutError, match="rows of experts are ragged"):
        expert_plan(BlockLayouts(rows, weight, hidden, weight, rows), ("e",))
    with pytest.raises(LayoutError, match="end as they begin"):
        expert_plan(BlockLayouts(rows, weight, rows, weight, Layout(grid, "e", "x")), ("e",))
