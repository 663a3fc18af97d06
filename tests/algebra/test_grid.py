"""Ranks and coordinates against NumPy's own row-major order."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtp.algebra.grid import Grid, divisors
from ndtp.errors import GridError

quick = settings(max_examples=200, deadline=None, derandomize=True)
NAMES = ("z", "x", "y", "dp", "ep")
grids = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(lambda s: Grid(dict(zip(NAMES, s, strict=False))))


@quick
@given(grids, st.data())
def test_ranks_are_row_major(grid: Grid, draw: st.DataObject) -> None:
    rank = draw.draw(st.integers(0, grid.num_ranks - 1))
    coordinate = grid.coordinate(rank)
    assert list(coordinate) == list(grid)
    assert tuple(coordinate.values()) == tuple(np.unravel_index(rank, grid.shape))
    assert grid.rank(**coordinate) == rank
    axes = draw.draw(st.lists(st.sampled_from(grid.names), unique=True))
    expected = np.ravel_multi_index([coordinate[axis] for axis in axes], [grid[axis] for axis in axes]) if axes else 0
    assert grid.index(rank, axes) == expected


@quick
@given(grids, st.data())
def test_groups_differ_on_their_axes_only_and_are_ordered_by_them(grid: Grid, draw: st.DataObject) -> None:
    rank = draw.draw(st.integers(0, grid.num_ranks - 1))
    axes = draw.draw(st.lists(st.sampled_from(grid.names), unique=True))
    group = grid.group(rank, axes)
    assert len(set(group)) == grid.size(axes) and rank in group
    assert [grid.index(member, axes) for member in group] == list(range(grid.size(axes)))
    rest = [axis for axis in grid if axis not in axes]
    assert {grid.index(member, rest) for member in group} == {grid.index(rank, rest)}
    assert all(grid.group(member, axes) == group for member in group)


def test_the_first_axis_is_the_slowest() -> None:
    grid = Grid(z=2, x=2, y=2)
    assert grid.coordinate(5) == {"z": 1, "x": 0, "y": 1}
    assert grid.group(0, ["y"]) == (0, 1) and grid.group(0, ["z"]) == (0, 4)
    assert grid.group(0, ["x", "z"]) == (0, 4, 2, 6) and grid.group(3, []) == (3,)
    assert grid.rank() == 0 and grid.rank(z=1) == 4


def test_grid_is_a_value() -> None:
    assert Grid(x=2, y=4) == Grid({"x": 2, "y": 4}) == Grid({"x": 2}, y=4) != Grid(y=4, x=2)
    assert len({Grid(x=2), Grid(x=2), Grid(x=3)}) == 2
    assert repr(Grid(x=2, y=4)) == "Grid(x=2, y=4)" and eval(repr(Grid(x=2, y=4))) == Grid(x=2, y=4)
    assert str(Grid(x=2, y=4)) == "x=2 y=4"
    assert list(Grid(x=2, y=4)) == ["x", "y"] and "x" in Grid(x=2) and "z" not in Grid(x=2) and None not in Grid(x=2)
    assert Grid(x=2, y=1, z=3).nontrivial(("z", "y", "x")) == ("z", "x")
    assert Grid(x=2, y=4).size(()) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 7, 8, 12, 36])
def test_all_grids(num_ranks: int) -> None:
    found = Grid.all(num_ranks)
    assert len(found) == len(set(found))
    expected = {(z, x, y) for z, x, y in np.ndindex(*(num_ranks + 1,) * 3) if z * x * y == num_ranks}
    assert {grid.shape for grid in found} == expected
    assert all(grid.names == ("z", "x", "y") for grid in found)
    assert Grid.all(num_ranks, ["tp"]) == [Grid(tp=num_ranks)]


@quick
@given(st.integers(1, 3000))
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_grids_of_more_ranks_than_anyone_could_list() -> None:
    grid = Grid(dp=10**4, z=10**3, x=10**3, y=10**3)
    assert grid.num_ranks == 10**13
    last = grid.num_ranks - 1
    assert grid.rank(**grid.coordinate(last)) == last
    assert len(grid.group(last, ["z"])) == 1000
    assert len(Grid.all(10**6)) == 784  # 2^6 5^6 into three factors: 28 * 28


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Grid, "at least one axis"),
        (lambda: Grid(x=0), "axis x has size 0"),
        (lambda: Grid(x=True), "size True"),
        (lambda: Grid(x=2.0), "size 2.0"),  # type: ignore[arg-type]
        (lambda: Grid({"a b": 2}), "'a b' is not a usable name"),
        (lambda: Grid({"None": 2}), "'None' is not a usable name"),
        (lambda: Grid({"interleaved_parallel": 2}), "not a usable name"),
        (lambda: Grid({"x": 2}, x=4), "axis x is given twice"),
        (lambda: Grid(x=2)["y"], "no axis 'y'; its axes are x"),
        (lambda: Grid(x=2).size(["y"]), "no axis 'y'"),
        (lambda: Grid(x=2).coordinate(2), "ranks 0 to 1, not 2"),
        (lambda: Grid(x=2).coordinate(-1), "ranks 0 to 1, not -1"),
        (lambda: Grid(x=2).rank(x=2), "positions 0 to 1, not 2"),
        (lambda: Grid(x=2).rank(w=0), "no axis 'w'"),
        (lambda: Grid(x=2).index(0, ["w"]), "no axis 'w'"),
        (lambda: Grid(x=2).group(0, ["w"]), "no axis 'w'"),
    ],
)
def test_errors(build: object, message: str) -> None:
    with pytest.raises(GridError, match=message):
        build()  # type: ignore[operator]
    assert issubclass(GridError, ValueError)


def test_num_ranks_is_the_product() -> None:
    assert Grid(z=2, x=3, y=5).num_ranks == prod((2, 3, 5))
