"""Which heads and rows of an attention a rank has: every key that a query needs is there, and no more is gathered."""

import itertools
from math import gcd

import pytest

from ndtp import Grid, GridError, Layout, LayoutError
from ndtp.algebra.attention_plan import AttentionPlan, SharedCut


def test_refined_grids_have_the_same_ranks():
    grid = Grid(x=2, y=4)
    fine = grid.refine(y=(2, 2))
    assert fine == Grid(x=2, y1=2, y2=2)
    layout = Layout(grid, ("x", "y"), None)
    for rank in range(8):
        assert layout.refine(y=(2, 2)).slices(rank, (16, 3)) == layout.slices(rank, (16, 3))
        assert fine.index(rank, ("y1", "y2")) == grid.index(rank, ("y",))
    with pytest.raises(GridError, match="taken apart into"):
        grid.refine(y=(2, 3))
    with pytest.raises(GridError, match="there already"):
        Grid(x=4, x1=2).refine(x=(2, 2))


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (4, 2), (2, 2, 2), (6, 2), (1, 4)])
def test_a_cut_gathers_the_minor_ranks(sizes):
    grid = Grid({f"a{i}x": size for i, size in enumerate(sizes)})
    axes = tuple(grid)
    for ranks in range(1, grid.num_ranks + 1):
        if grid.num_ranks % ranks:
            continue
        cut = SharedCut.of(grid, axes, ranks)
        fine = grid.refine(**dict(cut.refinement))
        assert fine.size((*cut.stays, *cut.gathered)) == grid.num_ranks
        gathered = fine.size(cut.gathered)
        assert gathered % ranks == 0
        powers = all(size & (size - 1) == 0 for size in sizes)
        assert gathered == ranks or not powers
        for rank in range(grid.num_ranks):
            assert fine.index(rank, cut.stays) == rank // gathered


def test_every_rank_has_the_keys_of_its_queries():
    grid = Grid(z=2, x=2, y=4)
    layout = Layout(grid, ("z", "x"), ("y",))
    for heads, kv_heads, dim in itertools.product((4, 8, 12), (1, 2, 3, 4, 6, 8, 12), (4, 8)):
        if heads % kv_heads:
            continue
        plan = AttentionPlan(layout, heads, kv_heads, dim)
        for rank in range(grid.num_ranks):
            target = plan.head_gather.target
            first = target.grid.index(rank, target.dims[2]) * plan.local_kv_heads
            for i, kv in enumerate(plan.kv_of(rank)):
                assert 0 <= kv < plan.local_kv_heads
                assert first + kv == (plan.first_head(rank) + i) // (heads // kv_heads)
    plan = AttentionPlan(layout, 4, 4, 8)
    for batch, length in itertools.product((1, 2, 3, 4, 6, 8), (4, 8, 12)):
        rows = plan.rows(batch, length)
        for rank in range(grid.num_ranks):
            start = plan.first_row(rank, batch, length)
            sequence, count = plan.sequences(rank, batch)
            assert sequence * length <= start and start + rows <= (sequence + count) * length
            assert count == batch // gcd(batch, 4) or gcd(batch, 4) == 1


def test_what_does_not_fit_is_named_with_what_would():
    layout = Layout(Grid(x=2, y=4), "x", "y")
    for sizes, word in (
        ((6, 6, 8), r"over \{1, 2, 3, 6\} ranks, or 8 heads"),
        ((8, 3, 8), r"kv_heads in \{1, 2, 4, 8\}"),
        ((4, 1, 2), "a divisor of 2"),
    ):
        with pytest.raises(LayoutError, match=word):
            AttentionPlan(layout, *sizes)
    with pytest.raises(LayoutError, match="a batch that is a multiple of 2, or sequences padded to a multiple of 2"):
        AttentionPlan(layout, 4, 4, 8).rows(1, 5)
