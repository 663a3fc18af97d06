"""What plans refuse and how they say it: the same on every rank, with the operands, the sizes and what would work."""

from __future__ import annotations

import os
import subprocess
import sys
from math import lcm
from pathlib import Path

import pytest
from simulate import assert_exact

from ndtp.algebra.binding import bind
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.stored import shown
from ndtp.errors import LayoutError

GRID = Grid(x=2, y=4)


def plan_of(a: str, b: str, out: str | None = None, **options: object) -> MatMulPlan:
    layouts = (Layout.parse(GRID, a), Layout.parse(GRID, b), None if out is None else Layout.parse(GRID, out))
    return MatMulPlan(*layouts, name="mlp.up", **options)


def refused(build: object) -> str:
    with pytest.raises(LayoutError) as error:
        build()  # type: ignore[operator]
    return str(error.value)


def test_a_size_that_does_not_divide() -> None:
    """The design's example, to the letter."""
    plan = plan_of("x None", "y None")
    assert refused(lambda: plan.volume((4, 10, 16))) == (
        "MatMul 'mlp.up': dim K of B (10) is split over axis y (4), and 4 does not divide 10.\n"
        "  A[M_x, K] . B[K_y, N] on grid x=2 y=4; B is (10, 16)\n"
        "  fix: y in {1, 2, 5, 10}, or pad K to 12 with pad=True"
    )
    assert bind(plan, (2, 12), (3, 16))[1] == {"m": 4, "n": 16, "k": 12}
    assert refused(lambda: plan.volume((3, 12, 16))).endswith("fix: x in {1, 3}, or pad M to 4 with pad=True")


def test_the_padding_named_suits_every_tensor() -> None:
    grid = Grid(x=3, y=2)
    plan = MatMulPlan(Layout(grid, "y", "x"), Layout(grid, "x", "y"))
    assert plan.out.dims == (("x",), ("y",)) and plan.granularity("m") == lcm(2, 3)
    assert refused(lambda: plan.volume((7, 6, 6))).endswith("pad M to 12 with pad=True")
    assert refused(lambda: plan.volume((8, 6, 6))).endswith("pad M to 12 with pad=True")


def test_orders_that_disagree() -> None:
    assert refused(lambda: plan_of("None (x y)", "(y x) None")) == (
        "MatMul 'mlp.up': B and the other tensors disagree on the order of the axes of K\n"
        "  A[M, K_xy] . B[K_yx, N] on grid x=2 y=4\n"
        "  fix: B as '(x y) None'"
    )
    assert "fix: C as '(x y) None'" in refused(lambda: plan_of("(x y) None", "None None", "(y x) None"))


def test_a_gathered_axis_that_is_major() -> None:
    message = refused(lambda: plan_of("(y x) None", "None y"))
    assert "A stores dim 0 over (y x), of which (x) must stay split" in message
    assert message.endswith("fix: A as '(x y) None'")
    message = refused(lambda: plan_of("x None", "None None", "(y x) None"))
    assert message.endswith("fix: C as '(x y) None'")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: plan_of("x", "x None"), "the layout of A, 'x', has 1 dims; 2 are needed"),
        (lambda: plan_of("x None", "x"), "the layout of B, 'x', has 1 dims; 2 are needed"),
        (lambda: plan_of("None x None", "x None", "x None"), "the layout of C, 'x None', has 2 dims; 3 are needed"),
        (lambda: plan_of("x None", "None y", "x y None"), "the layout of C, 'x y None', has 3 dims; 2 are needed"),
        (lambda: MatMulPlan(Layout(GRID, "x", ()), Layout(Grid(x=2), "x", ())), "B lies on grid x=2, A on grid"),
        (lambda: plan_of("x None", "None y", roles={"z": "m"}), "{'z': 'm'} does not give an axis of grid x=2 y=4"),
        (lambda: plan_of("x None", "None y", roles={"x": "batch"}), "one of the letters m, n, k"),
        (lambda: plan_of("x None", "None y", regather=("c",)), "regather=('c',) may name 'a' and 'b' only"),
        (lambda: plan_of("x None", "None y").volume((2, 2)), "give 0 batch sizes and M, K, N, not (2, 2)"),
        (lambda: bind(plan_of("x None", "None y"), (2, 2, 2), (2, 2)), "the shard of A has shape (2, 2, 2)"),
        (lambda: bind(plan_of("x None", "None y"), (2, 3), (4, 2)), "K is 3 in A (4, 3) and 4 in B (4, 8)"),
        (lambda: bind(plan_of("x None", "None y"), (2, 1), (4, 2)), "K is 1 in A (4, 1) and 4 in B (4, 8)"),
        (lambda: bind(plan_of("None x None", "None None y"), (3, 2, 4), (2, 4, 2)), "B is 3 in A (3, 4, 4) and 2 in B"),
    ],
)  # fmt: skip
def test_other_wrong_uses(build: object, message: str) -> None:
    assert message in refused(build)


def test_bind_finds_broadcast_dims_and_global_sizes() -> None:
    plan = plan_of("y None None", "None None x")
    same, sizes = bind(plan, (2, 3, 4), (8, 4, 5))
    assert same is plan and sizes == {"batch": 8, "m": 3, "k": 4, "n": 10}
    bound, sizes = bind(plan, (2, 3, 4), (1, 4, 5))
    assert bound.b_units == (0,) and bound.a_units == () and sizes["batch"] == 8
    assert bound.out == plan.out and bound.roles == plan.roles
    # B is whole and the same on all of y: its gradient is summed over the batch, and so over y.
    assert [str(step) for step in plan.relayouts["dB"]] == ["AG {} over y"]
    assert [str(step) for step in bound.relayouts["dB"]] == ["AR {} over y"]
    again, _ = bind(bound, (2, 3, 4), (8, 4, 5))
    assert again.b_units == () and [str(step) for step in again.relayouts["dB"]] == ["AG {} over y"]
    assert bind(bound, (2, 3, 4), (1, 4, 5))[0] is bound
    both, sizes = bind(plan_of("None None None", "None None x"), (1, 3, 4), (1, 4, 5))
    assert both.a_units == both.b_units == () and sizes["batch"] == 1
    empty, sizes = bind(plan, (0, 3, 4), (0, 4, 5))
    assert sizes["batch"] == 0 and empty.volume((0, 3, 4, 10)).total == 0


def test_binding_changes_no_announced_layout() -> None:
    """A that turns out to be broadcast gathers x instead of moving it, but C stays where `plan.out` says."""
    plan = plan_of("None None (y x)", "x y None")
    bound, _ = bind(plan, (1, 4, 1), (2, 2, 6))
    assert bound.a_units == (0,) and plan.out.dims == bound.out.dims == (("x",), (), ())
    assert_exact(bound, (1, 4, 8), (4, 8, 6))


def test_plans_print_as_the_design_writes_them() -> None:
    plan = MatMulPlan(Layout(GRID, None, None, ("x", "y")), Layout(GRID, "y", "x"), transpose_b=True)
    assert str(plan) == "A[B, M, K_xy] . B[N_y, K_x] -> C[B, M, N_yx]: AG A over y, RS C over x"
    assert str(plan_of("x None", "None y")) == "A[M_x, K] . B[K, N_y] -> C[M_x, N_y]: no communication"
    assert [shown(letter) for letter in ("m", "batch", "batch1", None)] == ["M", "B", "B1", "1"]


PROGRAM = """
from itertools import permutations, product
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout

grid = Grid(z=2, x=2, y=2)
splits = [None, "z", ("x", "y"), ("y", "x"), ("z", "x"), ("x", "z"), ("z", "y", "x")]
for a0, a1, b0, b1 in product(splits, repeat=4):
    try:
        plan = MatMulPlan(Layout(grid, a0, a1), Layout(grid, b0, b1))
        print(plan, plan.steps, plan.volume((8, 16, 12)), dict(plan.roles), plan.a.mesh_axes)
    except ValueError as error:
        print(error)
"""


def test_every_rank_plans_and_refuses_alike() -> None:
    """Nothing depends on the process: neither on its rank nor on the order in which its sets of strings come."""
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": seed, "RANK": seed, "LOCAL_RANK": seed},
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=60)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert first == second and first.count(b"fix:") > 100 and first.count(b"->") > 100
