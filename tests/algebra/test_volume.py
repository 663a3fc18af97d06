"""Volumes add up, and no plan with one copy of each operand moves less than the lower bound."""

from __future__ import annotations

import math
from itertools import product

import legal
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.volume import Traffic, Volume, lower_bound
from ndtp.errors import LayoutError


def three_d(grid: Grid) -> MatMulPlan:
    return MatMulPlan(Layout(grid, ("z", "y"), "x"), Layout(grid, ("x", "z"), "y"))


@pytest.mark.parametrize(
    ("shape", "grid"),
    [  # M / z, K / x and N / y are what the bound's regime wants equal; an axis of 1 leaves a dim whole
        ((8 * 40, 2 * 40, 4 * 40), Grid(z=8, x=2, y=4)),  # three dims split
        ((4 * 40, 8 * 40, 2 * 40), Grid(z=4, x=8, y=2)),
        ((2 * 40, 2 * 40, 2 * 40), Grid(z=2, x=2, y=2)),
        ((8 * 40, 16, 4 * 40), Grid(z=8, x=1, y=4)),  # two dims split, K smallest
        ((32, 4 * 40, 8 * 40), Grid(z=1, x=4, y=8)),  # two dims split, M smallest
        ((4 * 40, 8 * 40, 16), Grid(z=4, x=8, y=1)),  # two dims split, N smallest
        ((640, 32, 16), Grid(z=16, x=1, y=1)),  # one dim split: M largest
        ((32, 640, 16), Grid(z=1, x=16, y=1)),
        ((16, 32, 640), Grid(z=1, x=1, y=16)),
        ((6, 6, 6), Grid(z=1, x=1, y=1)),
    ],
)
def test_3d_attains_the_lower_bound_where_the_ideal_grid_is_an_integer_one(
    shape: tuple[int, int, int], grid: Grid
) -> None:
    m, k, n = shape
    assert three_d(grid).volume(shape, 1).forward == pytest.approx(lower_bound(m, n, k, grid.num_ranks), rel=1e-12)


@pytest.mark.parametrize("grid", [Grid(z=2, x=2, y=2), Grid(z=4, y=2), Grid(x=2, y=3)], ids=str)
def test_no_plan_with_one_copy_of_each_operand_beats_the_bound(grid: Grid) -> None:
    """Every layout in which every axis splits A and B, with the default output or any one that every axis splits."""
    whole = [
        d for d in legal.all_dims(grid.names, 2) if all(any(g in s for s in d) for g in grid.nontrivial(grid.names))
    ]
    p = grid.num_ranks
    checked = 0
    for a, b, out in product(whole, whole, [None, *whole[::5]]):
        try:
            plan = MatMulPlan(Layout(grid, *a), Layout(grid, *b), None if out is None else Layout(grid, *out))
        except LayoutError:
            continue
        for m, k, n in ((p, p, p), (16 * p, p, 2 * p), (p, 24 * p, p), (3 * p, p, 48 * p), (2 * p, 64 * p, 64 * p)):
            assert plan.volume((m, k, n), 1).forward >= lower_bound(m, n, k, p) * (1 - 1e-12), plan
            checked += 1
    assert checked > 50


sizes = st.integers(1, 10**5)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sizes, sizes, sizes, st.integers(1, 10**6))
def test_lower_bound_does_not_depend_on_the_order_of_dims_and_is_no_less_than_nothing(
    m: int, n: int, k: int, ranks: int
) -> None:
    bound = lower_bound(m, n, k, ranks)
    for order in ((m, k, n), (n, m, k), (k, n, m)):
        assert lower_bound(*order, ranks) == bound
    assert bound >= -1e-6 * (m * n + n * k + m * k)
    assert lower_bound(m, n, k, 1) == pytest.approx(0, abs=1e-9 * (m * n + n * k + m * k))


@pytest.mark.parametrize(("large", "middle", "small"), [(64, 8, 2), (1024, 64, 64), (96, 12, 1), (512, 512, 16)])
def test_the_regimes_of_the_bound_meet_at_their_borders(large: int, middle: int, small: int) -> None:
    """At P = m/n and P = mn/k^2 the two formulas that meet give one value; written out here a second time."""
    m, n, k = large, middle, small
    one = lambda p: (m * n + m * k) / p + n * k  # noqa: E731
    two = lambda p: 2 * math.sqrt(m * n * k * k / p) + m * n / p  # noqa: E731
    three = lambda p: 3 * (m * n * k / p) ** (2 / 3)  # noqa: E731
    first, second = m // n, m * n // k**2
    assert one(first) == pytest.approx(two(first)) and two(second) == pytest.approx(three(second))
    owned = lambda p: (m * n + n * k + m * k) / p  # noqa: E731
    for ranks in (first, second):
        around = [lower_bound(n, k, m, ranks) + owned(ranks), lower_bound(n, k, m, ranks + 1) + owned(ranks + 1)]
        formula = two if ranks == first else three
        assert around == pytest.approx([formula(ranks), formula(ranks + 1) if first != second else around[1]])
    if first > 1:
        assert lower_bound(m, n, k, first - 1) + owned(first - 1) == pytest.approx(one(first - 1))


def test_volumes_add_and_are_sorted() -> None:
    gather = Traffic("forward", "all_gather", ("y",), 6, elements=3, tensor="up A", dtype="bf16")
    reduce = Traffic("dgrad", "reduce_scatter", ("z", "dp"), 4, elements=2, dtype="bf16", calls=2)
    volume = Volume.of([gather, reduce, gather])
    assert volume == Volume.of([gather, gather, reduce])
    assert volume.entries == (reduce, Traffic("forward", "all_gather", ("y",), 12))
    assert volume.total == 16 and volume.forward == 12 and volume.backward == 4
    assert volume.by("collective") == {"all_gather": 12, "reduce_scatter": 4}
    assert volume.by("axes") == {"(z dp)": 4, "y": 12} and volume.by("phase") == {"dgrad": 4, "forward": 12}
    assert (volume + volume).total == 32 and (volume + Volume()) == volume
    assert volume.elements == 8 and [entry.calls for entry in volume] == [2, 2]
    assert volume.by("tensor", "elements") == {"": 2, "up A": 6} and volume.by("dtype", "calls") == {"bf16": 4}
    assert str(volume) == "dgrad RS[(z dp)] 4, forward AG[y] 12" and str(Volume()) == "no communication"


def test_phases_that_are_not_needed_cost_nothing() -> None:
    """A frozen weight or an input without gradient skips its product; dC is gathered once, by whoever comes first."""
    plan = three_d(Grid(z=2, x=2, y=2))
    full = plan.volume((16, 32, 64)).by("phase")
    dgrad, wgrad = (plan.volume((16, 32, 64), **phase).by("phase") for phase in ({"wgrad": False}, {"dgrad": False}))
    assert dgrad == {"forward": full["forward"], "dgrad": full["dgrad"]}
    gathered_dc = 16 * 64 // 4 // 2 * 4
    assert wgrad == {"forward": full["forward"], "wgrad": full["wgrad"] + gathered_dc}
    assert plan.volume((16, 32, 64), dgrad=False, wgrad=False).total == full["forward"]


def test_local_products_share_the_work() -> None:
    grid = Grid(b=2, z=2, x=3, y=2)
    plan = MatMulPlan(Layout(grid, "b", ("z", "y"), "x"), Layout(grid, "b", ("x", "z"), "y"))
    shape = (4, 12, 18, 12)
    assert plan.gemm_shape(shape) == (2, 6, 6, 6)
    assert math.prod(plan.gemm_shape(shape)) * grid.num_ranks == math.prod(shape)


def test_a_plan_for_more_ranks_than_anyone_could_list() -> None:
    grid = Grid(dp=10**4, z=10**3, x=10**3, y=10**3)
    plan = MatMulPlan(Layout(grid, ("dp", "z", "y"), "x"), Layout(grid, ("x", "z"), "y"))
    volume = plan.volume((10**11, 10**7, 10**7), 1, bias=True)
    assert volume.by("axes")["y"] == 2 * (10**11 // 10**7 * 10**4 * 999 // 1000)
    with pytest.raises(
        LayoutError, match=r"fix: the product of dp z y in \{1, 100000000019\}, or pad M to 110000000000"
    ):
        plan.volume((10**11 + 19, 10**7, 10**7))
