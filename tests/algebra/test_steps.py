"""Every way from a held to a stored layout, run on data: the right block arrives, in order, at the price said."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import legal
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from simulate import Run, shard

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.steps import Dims, apply, is_legal, received, relayout_steps


def check(grid: Grid, held: Dims, stored: Dims, partial: tuple[str, ...]) -> None:
    """Give every rank a part of the sum over `partial`, run the steps, expect the stored block of the dense tensor."""
    steps = relayout_steps(grid, held, stored, partial)
    rng = np.random.default_rng(0)
    parts = [rng.integers(-9, 10, (grid.num_ranks,) * len(held)) for _ in range(grid.size(partial))]
    dense = sum(parts)
    start = [shard(parts[grid.index(rank, partial)], grid, held, rank) for rank in range(grid.num_ranks)]
    run = Run(grid)
    found = run.follow("", steps, start)
    for rank, tensor in enumerate(found):
        wanted = shard(dense, grid, stored, rank)
        assert tensor.shape == wanted.shape and (tensor == wanted).all(), (grid, held, stored, partial, steps)
    totals: dict[tuple[str, str, tuple[str, ...]], int] = {}
    local = start[0].shape
    for step, after, amount in apply(grid, steps, start[0].shape):
        local = after
        if step.kind != "slice":
            totals["", step.kind, step.axes] = totals.get(("", step.kind, step.axes), 0) + amount
    assert local == found[0].shape and totals == dict(run.received)
    # Never dearer than reducing everything, gathering everything and cutting out the block.
    assert sum(totals.values()) <= 2 * dense.size + dense.size
    assert all(grid[axis] > 1 for step in steps for axis in step.axes)
    order = [step.kind for step in steps]
    if "reduce_scatter" in order and "all_reduce" in order:
        assert order.index("all_reduce") > len(order) - 1 - order[::-1].index("reduce_scatter")


def legal_by_reading(grid: Grid, held: Dims, stored: Dims) -> bool:
    """The axes that stay in a dim lead in it, before and after, in one order."""
    for before, after in zip(held, stored, strict=True):
        before, after = ([axis for axis in axes if grid[axis] > 1] for axes in (before, after))
        stay = [axis for axis in before if axis in after]
        if before[: len(stay)] != stay or after[: len(stay)] != stay:
            return False
    return True


@pytest.mark.parametrize("grid", [Grid(x=2, y=3), Grid(x=1, y=2), Grid(x=2, y=2, z=2)], ids=str)
def test_every_pair_of_layouts(grid: Grid) -> None:
    layouts = list(legal.all_dims(grid.names, 2))
    legal_pairs = 0
    for held, stored in product(layouts, layouts):
        assert is_legal(grid, held, stored) == legal_by_reading(grid, held, stored)
        if is_legal(grid, held, stored):
            free = [axis for axis in grid if axis not in {a for axes in held for a in axes}]
            for count in range(len(free) + 1):
                for partial in combinations(free, count):
                    check(grid, held, stored, partial)
                    legal_pairs += 1
    assert legal_pairs > len(layouts)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_pairs_of_layouts(draw: st.DataObject) -> None:
    sizes = draw.draw(st.lists(st.sampled_from((1, 2, 2, 3)), min_size=1, max_size=4).filter(lambda s: prod(s) <= 12))
    grid = Grid(dict(zip("wxyz", sizes, strict=False)))

    def layout() -> Dims:
        dims: list[list[str]] = [[], [], []]
        for axis in draw.draw(st.permutations(grid.names)):
            where = draw.draw(st.sampled_from((None, 0, 1, 2)))
            if where is not None:
                dims[where].append(axis)
        return tuple(map(tuple, dims))

    held, stored = layout(), layout()
    assert is_legal(grid, held, stored) == legal_by_reading(grid, held, stored)
    assume(is_legal(grid, held, stored))
    free = [axis for axis in grid if axis not in {a for axes in held for a in axes}]
    check(grid, held, stored, tuple(axis for axis in free if draw.draw(st.booleans())))


GRID = Grid(z=2, x=2, y=2)
TABLE = {  # held, stored, partial -> steps
    "partial -> split": ("None None", "x None", "x", "RS over x"),
    "partial -> replicated": ("None None", "None None", "x", "AR over x"),
    "split -> replicated": ("x None", "None None", "", "AG over x"),
    "replicated -> split": ("None None", "x None", "", "slice over x"),
    "split -> another dim": ("x None", "None x", "", "A2A over x"),
    "nothing": ("x y", "x y", "", ""),
    "gathers run minor first": ("(z x y) None", "None None", "", "AG over y, AG over x, AG over z"),
    "scatters run major first": ("None None", "(y z) x", "x y z", "RS over y, RS over z, RS over x"),
    "reduce-scatter before all-reduce": ("None None", "None y", "x y z", "RS over y, AR over z x"),
    "slices before scatters": ("None None", "y x", "x", "slice over y, RS over x"),
    "scatters before gathers": ("z None", "None x", "x", "RS over x, AG over z"),
    "slices before anything that moves": ("z None", "None y", "x", "slice over y, AR over x, AG over z"),
    "an exchange of two dims gathers one": ("x y", "y x", "", None),
}


@pytest.mark.parametrize("row", TABLE)
def test_table(row: str) -> None:
    held, stored, partial, expected = TABLE[row]
    steps = relayout_steps(GRID, Layout.parse(GRID, held).dims, Layout.parse(GRID, stored).dims, partial.split())
    if expected is not None:
        assert ", ".join(str(step).format("").replace("  ", " ") for step in steps) == expected
    else:
        assert sorted(step.kind for step in steps) == ["all_gather", "all_to_all", "slice"]


def test_price_of_a_collective() -> None:
    assert received("all_gather", 24, 4) == received("reduce_scatter", 24, 4) == received("all_to_all", 24, 4) == 18
    assert received("all_reduce", 24, 4) == 36
    assert received("all_reduce", 1, 4) == 6  # one element a block: what does not divide rounds up
    assert received("slice", 24, 4) == received("all_reduce", 24, 1) == received("all_gather", 0, 4) == 0
