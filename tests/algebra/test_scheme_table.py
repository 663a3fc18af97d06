"""`MatMulPlan` against what is published: the scheme table, MindSpore's forms, Megatron's f and g, FSDP, volumes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from simulate import assert_exact

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError

ELEMENT = 1  # counted as bytes of numbers of one byte


def plan_of(grid: Grid, a: str, b: str, out: str | None = None, **options: object) -> MatMulPlan:
    layouts = (Layout.parse(grid, a), Layout.parse(grid, b), None if out is None else Layout.parse(grid, out))
    return MatMulPlan(*layouts, **options)


def moves(plan: MatMulPlan, phase: str) -> list[str]:
    return [str(step) for step in plan.steps if step.phase == phase]


CUBE = Grid(z=2, x=2, y=3)

# A, B, out, C, forward, dgrad, wgrad
SCHEMES = {
    "1d column": ("None None", "None x", None, "None x", [], ["AR dA over x"], []),
    "1d row": ("None x", "x None", None, "None None", ["AR C over x"], [], []),
    "1d row, scattered": ("None x", "x None", "x None", "x None", ["RS C over x"], ["AG dC over x"], []),
    "1d column, sequence": ("x None", "None x", None, "None x", ["AG A over x"], ["RS dA over x"], []),
    "2d feature split": (
        "None (x y)",
        "x y",
        None,
        "None (y x)",
        ["AG A over y", "RS C over x"],
        ["AG dC over x", "RS dA over y"],
        [],
    ),
    "2d row split": ("y x", "x y", None, "x y", ["AG A over y", "RS C over x"], ["AG dC over x", "RS dA over y"], []),
    "3d": (
        "(z y) x",
        "(x z) y",
        None,
        "(z x) y",
        ["AG A over y", "AG B over z", "RS C over x"],
        ["AG dC over x", "RS dA over y"],
        ["RS dB over z"],
    ),
    "3d, second product": (
        "(z x) y",
        "(y z) x",
        None,
        "(z y) x",
        ["AG A over x", "AG B over z", "RS C over y"],
        ["AG dC over y", "RS dA over x"],
        ["RS dB over z"],
    ),
    "data parallel": ("x None", "None None", None, "x None", [], [], ["AR dB over x"]),
    "fsdp": ("x None", "x None", None, "x None", ["AG B over x"], [], ["RS dB over x"]),
    "fsdp, weight split on N": ("x None", "None x", None, "None x", ["AG A over x"], ["RS dA over x"], []),
    "gathered output": (
        "None None",
        "None x",
        "None None",
        "None None",
        ["AG C over x"],
        ["slice dC over x", "AR dA over x"],
        [],
    ),
    "replicated input of a row": (
        "None None",
        "x None",
        None,
        "None None",
        ["slice A over x", "AR C over x"],
        ["AG dA over x"],
        [],
    ),
    "output on another dim": (
        "None None",
        "None x",
        "x None",
        "x None",
        ["A2A C over x"],
        ["A2A dC over x", "AR dA over x"],
        [],
    ),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("transposed", list(product((False, True), repeat=2)), ids=str)
def test_scheme(name: str, transposed: tuple[bool, bool]) -> None:
    """Each row of the design's table, its gradients, and the same with operands transposed."""
    a, b, out, c, *phases = SCHEMES[name]
    ta, tb = transposed
    layouts = [Layout.parse(CUBE, text) for text in (a, b)]
    layouts = [x.with_dims(*reversed(x.dims)) if t else x for x, t in zip(layouts, transposed, strict=True)]
    requested = None if out is None else Layout.parse(CUBE, out)
    plan = MatMulPlan(*layouts, requested, transpose_a=ta, transpose_b=tb)
    assert plan.out == Layout.parse(CUBE, c)
    assert [moves(plan, phase) for phase in ("forward", "dgrad", "wgrad")] == phases
    assert_exact(plan, (24, 12) if ta else (12, 24), (36, 24) if tb else (24, 36))


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_with_a_data_parallel_axis_and_a_batch_axis(name: str) -> None:
    """Any scheme may carry more axes: dp as the major axis of M, ep on a batch dim."""
    grid = Grid(ep=2, dp=2, z=1, x=2, y=2)
    a, b, out, c, *_ = SCHEMES[name]
    a_dims, b_dims, c_dims = (Layout.parse(CUBE, text).dims for text in (a, b, c))
    carry = lambda dims: ("ep", ("dp", *dims[0]), dims[1])  # noqa: E731
    requested = Layout(grid, *carry(c_dims)) if out else None
    plan = MatMulPlan(Layout(grid, *carry(a_dims)), Layout(grid, "ep", *b_dims), requested)
    assert plan.out.dims == Layout(grid, *carry(c_dims)).dims
    assert plan.roles["dp"] == "m" and plan.roles["ep"] == "batch"
    assert any(move.startswith("AR dB over dp") for move in moves(plan, "wgrad"))
    assert_exact(plan, (4, 16, 16), (4, 16, 16))


def test_megatron_f_and_g() -> None:
    """Column then row: nothing before the first product, one all-reduce after the second; backward the other way."""
    grid = Grid(tp=4)
    column, row = plan_of(grid, "None None", "None tp"), plan_of(grid, "None tp", "tp None")
    assert column.out == row.a
    assert moves(column, "forward") == [] and moves(column, "dgrad") == ["AR dA over tp"]  # f
    assert moves(row, "forward") == ["AR C over tp"] and moves(row, "dgrad") == []  # g
    assert moves(column, "wgrad") == moves(row, "wgrad") == []


def test_fsdp_gathers_the_weight_again_for_dgrad_only() -> None:
    grid = Grid(d=4)
    plan = plan_of(grid, "d None", "d None", regather=("b",))
    assert moves(plan, "forward") == ["AG B over d"]
    assert moves(plan, "dgrad") == ["AG B over d"] and moves(plan, "wgrad") == ["RS dB over d"]
    assert plan.volume((8, 16, 32)).by("phase", "elements") == {"forward": 384, "dgrad": 384, "wgrad": 384}
    assert plan.volume((8, 16, 32), dgrad=False).by("phase", "elements") == {"forward": 384, "wgrad": 384}


def test_bias_gradient_is_summed_over_the_axes_that_split_rows() -> None:
    grid = Grid(dp=2, z=2, x=2, y=2)
    plan = plan_of(grid, "(dp z y) x", "(x z) y")
    assert plan.bias.dims == (("y",),)
    assert [str(step) for step in plan.relayouts["dbias"]] == ["AR {} over dp z"]  # dC is gathered over x
    with_bias = plan.volume((16, 16, 48), bias=True) + Volume()
    assert with_bias.elements - plan.volume((16, 16, 48)).elements == 2 * 3 * 24 // 4
    assert plan.volume((16, 16, 48), dgrad=False, wgrad=False, bias=True).by("phase", "elements") == {
        "forward": plan.volume((16, 16, 48), ELEMENT).forward,
        "wgrad": 84,
    }


# ---------------------------------------------------------------------------------------------------- MindSpore


def test_mindspore_sample() -> None:
    """(1024 x 256) . (256 x 512) -> ReLU -> . (512 x 256) on 2 x 4 devices, as its tutorial has it."""
    layout = Layout.over((2, 4), ("x", "y"))
    first = MatMulPlan(layout("None", ("x", "y")), layout("x", "y"))
    relu = layout("None", ("y", "x"))
    second = MatMulPlan(relu, layout("y", "x"))
    assert first.out == relu and second.out == first.a
    assert str(first) == "A[M, K_xy] . B[K_x, N_y] -> C[M, N_yx]: AG A over y, RS C over x"
    assert str(second) == "A[M, K_yx] . B[K_y, N_x] -> C[M, N_xy]: AG A over x, RS C over y"
    tokens, hidden, inner = 1024, 256, 512
    forward = first.volume((tokens, hidden, inner), ELEMENT).forward
    forward += second.volume((tokens, inner, hidden), ELEMENT).forward
    assert forward == 2 * tokens * (inner * (2 - 1) + hidden * (4 - 1)) // 8
    assert_exact(first, (16, 16), (16, 24))


MINDSPORE = {  # in_strategy of the activation and of the weight, layout of the result
    "1d column": (("None", "None"), ("None", "x"), ("None", "x")),
    "1d row": (("None", "x"), ("x", "None"), ("None", "None")),
    "2d": (("None", ("x", "y")), ("x", "y"), ("None", ("y", "x"))),
    "2d with rows": (("z", ("x", "y")), ("x", "y"), ("z", ("y", "x"))),
    "3d": ((("z", "y"), "x"), (("x", "z"), "y"), (("z", "x"), "y")),
}


@pytest.mark.parametrize("form", MINDSPORE)
@pytest.mark.parametrize("transposed", list(product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("batched", ["", "b", "whole"])
def test_mindspore_forms_on_every_grid(form: str, transposed: tuple[bool, bool], batched: str) -> None:
    """MatMul and BatchMatMul, either transpose, every grid of 8 devices: sizes of 1 on any axis change no layout.

    The batch dim is split by an axis of its own, or it is whole and the weight has none.
    """
    batch = {"": (), "b": ("b",), "whole": ("None",)}[batched]
    for z, x, y in [(z, x, y) for z in (1, 2, 4, 8) for x in (1, 2, 4, 8) for y in (1, 2, 4, 8) if z * x * y == 8]:
        layout = Layout.over((2 if batch == ("b",) else 1, z, x, y), ("b", "z", "x", "y"))
        a, b, c = MINDSPORE[form]
        a, b = (tuple(reversed(dims)) if t else dims for dims, t in zip((a, b), transposed, strict=True))
        b_batch = () if batched == "whole" else batch
        plan = MatMulPlan(
            layout(*batch, *a), layout(*b_batch, *b), transpose_a=transposed[0], transpose_b=transposed[1]
        )
        assert plan.out == layout(*batch, *c)
        assert_exact(plan, (*(4 for _ in batch), 16, 16), (*(4 for _ in b_batch), 16, 16))


def test_mindspore_interleaved_parallel() -> None:
    layout = Layout.over((2, 4, 2), ("x", "y", "interleaved_parallel"))
    plan = MatMulPlan(layout(("x", "interleaved_parallel"), "None"), layout("None", "y"))
    assert plan.grid.num_ranks == 8 and plan.a.chunks == (0, 2)
    assert plan.out.dims == (("x",), ("y",))


def test_the_older_order_of_k_is_refused_and_the_fix_is_the_newer() -> None:
    grid = Grid(z=2, x=2, y=2)
    with pytest.raises(LayoutError) as error:
        plan_of(grid, "(z y) x", "(z x) y", name="mlp.up")
    assert str(error.value) == (
        "MatMul 'mlp.up': B stores dim 0 over (z x), of which (x) must stay split in the order (x); axes that are "
        "gathered or scattered must be the minor ones, so that blocks stay contiguous\n"
        "  A[M_zy, K_x] . B[K_zx, N_y] on grid z=2 x=2 y=2\n"
        "  fix: B as '(x z) y'"
    )
    for sizes in ((1, 2, 2), (2, 1, 2)):  # of two axes of which one is trivial either order is right
        plan = plan_of(Grid(dict(zip("zxy", sizes, strict=True))), "(z y) x", "(z x) y")
        assert_exact(plan, (8, 8), (8, 16))


# ------------------------------------------------------------------------------------------------------ volumes


def block_volume(grid: Grid, tokens: int, hidden: int, inner: int, scheme: str, dtype: str | int = ELEMENT) -> Volume:
    """Both products of MatMul -> activation -> MatMul."""
    first, second = {
        "3d": (("(z y) x", "(x z) y"), ("(z x) y", "(y z) x")),
        "2d": (("None (x y)", "x y"), ("None (y x)", "y x")),
        "1d": (("None None", "None (z x y)"), ("None (z x y)", "(z x y) None")),
    }[scheme]
    up, down = plan_of(grid, *first), plan_of(grid, *second)
    assert down.a == up.out and down.out == up.a
    return up.volume((tokens, hidden, inner), dtype) + down.volume((tokens, inner, hidden), dtype)


@pytest.mark.parametrize("grid", [*Grid.all(8), *Grid.all(12), *Grid.all(64)], ids=str)
def test_block_volume_is_the_published_formula(grid: Grid) -> None:
    """2 [T e (x-1) + T h (y-1) + h e (z-1)] / (xyz); 1D is 2 (P-1) T h / P; backward moves as much as forward."""
    z, x, y = grid.shape
    ranks = grid.num_ranks
    tokens, hidden, inner = 5 * ranks, 7 * ranks, 11 * ranks
    volume = block_volume(grid, tokens, hidden, inner, "3d")
    forward = 2 * (tokens * inner * (x - 1) + tokens * hidden * (y - 1) + hidden * inner * (z - 1))
    assert volume.forward * ranks == forward
    assert volume.backward == volume.forward
    if z == 1:
        assert block_volume(grid, tokens, hidden, inner, "2d").forward == volume.forward
    one = block_volume(grid, tokens, hidden, inner, "1d")
    assert one.forward * ranks == 2 * (ranks - 1) * tokens * hidden
    assert one.backward == one.forward


MIB = {  # bf16 MiB per rank, forward block of 8192 tokens, 4096 hidden, 16384 inner
    ("1d", 2): 64,
    ("1d", 4): 96,
    ("2d", 4): 160,
    ("1d", 8): 112,
    ("2d", 8): 112,
    ("3d", 8): 80,
    ("1d", 16): 120,
    ("2d", 16): 88,
    ("3d", 16): 72,
    ("1d", 64): 126,
    ("2d", 64): 54,
    ("3d", 64): 34,
}


@pytest.mark.parametrize(("scheme", "ranks"), MIB)
def test_best_volume_of_a_forward_block(scheme: str, ranks: int) -> None:
    """The best grid of every scheme: what any planner has to find."""
    grids = {
        "1d": [Grid(z=1, x=1, y=ranks)],
        "2d": [g for g in Grid.all(ranks) if g["z"] == 1 and g["x"] > 1 and g["y"] > 1],
        "3d": Grid.all(ranks),
    }[scheme]
    volumes = {grid: block_volume(grid, 8192, 4096, 16384, scheme, "bf16").forward / 2**20 for grid in grids}
    assert min(volumes.values()) == MIB[scheme, ranks]
    if (scheme, ranks) == ("3d", 8):
        assert volumes[Grid(z=2, x=1, y=4)] == 80


def test_volume_beside_axonn() -> None:
    """1024 x 512 x 2048 fp32 on 2x2x2: AxoNN moves 2.5 MiB forward and 4.0 with backward."""
    volume = plan_of(Grid(z=2, x=2, y=2), "(z y) x", "(x z) y").volume((1024, 512, 2048))
    assert volume.forward == 1.75 * 2**20 and volume.total == 3.5 * 2**20
    assert volume.by("collective") == {"all_gather": 1.75 * 2**20, "reduce_scatter": 1.75 * 2**20}


@pytest.mark.parametrize("grid", [*Grid.all(8), *Grid.all(64)], ids=str)
def test_one_all_reduce_over_several_axes(grid: Grid) -> None:
    """1D on N_xyz: one step over all axes that split, 2 (P-1)/P of C, not the sum over axes one by one."""
    plan = plan_of(grid, "None (z x y)", "(z x y) None")
    (step,) = plan.steps
    assert step.step.axes == grid.nontrivial(grid.names) and step.step.kind == "all_reduce"
    ranks, shape = grid.num_ranks, (2 * grid.num_ranks, grid.num_ranks, 64)
    assert plan.volume(shape).elements * ranks == 2 * (ranks - 1) * shape[0] * shape[2]


@pytest.mark.parametrize("order", [("z", "x", "y"), ("y", "x", "z")], ids=str)
def test_several_gathered_axes_cost_what_one_gather_over_all_of_them_costs(order: Sequence[str]) -> None:
    grid = Grid(z=2, x=2, y=3)
    plan = MatMulPlan(Layout(grid, None, order), Layout(grid, None, None), roles=dict.fromkeys(order, "n"))
    assert moves(plan, "forward") == [f"AG A over {axis}" for axis in reversed(order)] + [
        f"slice B over {axis}" for axis in grid
    ]
    assert plan.volume((12, 12, 24), ELEMENT).forward == 12 * 12 * 11 // 12
