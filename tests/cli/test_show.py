import io
import json
from itertools import pairwise

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.cli.app import app
from ndtp.cli.panels import PHASES, plan_panels
from ndtp.cli.timeline_drawing import as_text
from ndtp.planner.block_cost import Block
from ndtp.planner.block_schedule import schedule
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import Request
from ndtp.planner.search import predict

runner = CliRunner()
CUBE = ("--grid", "z=2,x=2,y=2")
SCHEDULE = ("schedule", *CUBE, "--tokens", 8192, "--hidden", 4096, "--ffn", 16384)


def show(*arguments):
    return runner.invoke(app, ["show", *map(str, arguments)])


def test_a_layout_in_plain_ascii():
    result = show("layout", *CUBE, "--layout", "(z y) x", "--shape", "16,8")
    assert result.exit_code == 0, result.output
    assert result.stdout.isascii()
    assert [line for line in result.stdout.splitlines() if "|" in line] == [
        "  0:4 |  0  |  2  |",
        "  4:8 |  1  |  3  |",
        " 8:12 |  4  |  6  |",
        "12:16 |  5  |  7  |",
    ]


@pytest.mark.parametrize("layout, shape", [("x", "4"), ("z None (x y)", "2,3,8"), ("z x None y", "2,2,2,2")])
def test_any_number_of_dims(layout, shape, tmp_path):
    path = tmp_path / "layout.json"
    result = show("layout", *CUBE, "--layout", layout, "--shape", shape, "--json", path)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    parsed = Layout.parse(Grid(z=2, x=2, y=2), layout)
    assert report["layout"] == layout and report["grid"] == {"z": 2, "x": 2, "y": 2}
    for block in report["blocks"]:
        for rank in block["ranks"]:
            held = [[part.start, part.stop] for part in parsed.slices(rank, report["shape"])]
            assert held == block["slices"]
    assert sorted(rank for block in report["blocks"] for rank in block["ranks"]) == list(range(8))


def test_what_does_not_fit_is_left_out_in_the_middle():
    result = show("layout", "--grid", "x=64,y=64", "--layout", "x y")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "..." in result.stdout and "4095" in result.stdout


@pytest.mark.parametrize("suffix, start", [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_pictures_in_files(suffix, start, tmp_path):
    for kind in (("layout", "--layout", "z (x y) None"), ("plan", "--a", "(z y) x", "--b", "(x z) y")):
        path = tmp_path / f"{kind[0]}.{suffix}"
        result = show(kind[0], *CUBE, *kind[1:], "--output", path)
        assert result.exit_code == 0, result.output
        assert path.read_bytes().startswith(start) and path.stat().st_size > 5_000


def test_a_plan_from_stored_shards_to_the_scattered_result():
    result = show("plan", *CUBE, "--a", "(z y) x", "--b", "(x z) y", "--shape", "16,8,24", "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["equation"] == "A[M_zy, K_x] . B[K_xz, N_y] -> C[M_zx, N_y]"
    stages = {row["tensor"]: [(s["step"], s["layout"]) for s in row["stages"]] for row in report["tensors"]}
    assert stages == {
        "A": [(None, "(z y) x"), ("AG A over y", "z x")],
        "B": [(None, "(x z) y"), ("AG B over z", "x y")],
        "C": [(None, "z y"), ("RS C over x", "(z x) y")],
    }
    assert [stage["partial_over"] for stage in report["tensors"][2]["stages"]] == [["x"], []]
    assert (
        report["received_elements"]
        == MatMulPlan(Layout.parse(Grid(z=2, x=2, y=2), "(z y) x"), Layout.parse(Grid(z=2, x=2, y=2), "(x z) y"))
        .volume((16, 8, 24))
        .by("phase", "elements")["forward"]
    )
    assert "AG A over y: A[M_z, K_x]" in result.stderr
    assert max(map(len, result.stderr.splitlines())) <= 110  # the heading is one line


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("regather", [(), ("a", "b")])
@pytest.mark.parametrize(
    "a, b, out",
    [
        ("(z y) x", "(x z) y", None),
        ("None x", "x None", None),
        ("y x", "None None", "x y"),
        ("z y x", "z x None", None),
    ],
)
def test_every_phase_ends_as_the_plan_says(a, b, out, phase, regather):
    grid = Grid(z=2, x=2, y=2)
    parse = lambda text: Layout.parse(grid, text) if text else None  # noqa: E731
    plan = MatMulPlan(parse(a), parse(b), parse(out), regather=regather)
    rows = plan_panels(plan, (16,) * (len(plan.batch_letters) + 3), phase)
    operands, result = rows[:-1], rows[-1]
    stored = {"forward": plan.out, "dgrad": plan.a, "wgrad": plan.b}[phase]
    assert [grid.nontrivial(axes) for axes in result[-1].layout.dims] == [grid.nontrivial(x) for x in stored.dims]
    assert result[-1].partial == ()
    letters = {"A": plan.a_letters, "B": plan.b_letters, "dC": plan.c_letters}
    for row in operands:
        need = plan.need(letters[row[0].title.split("[")[0]])
        assert [grid.nontrivial(x) for x in row[-1].layout.dims] == [grid.nontrivial(x) for x in need]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("layout", "--grid", "x:4", "--layout", "x"), "write it like z=2,x=2,y=2"),
        (("layout", "--grid", "x=100000", "--layout", "x"), "up to 4096 ranks"),
        (("layout", "--grid", "x=3", "--layout", "x", "--shape", "4"), "pad dim 0 to 6"),
        (("layout", "--grid", "x=2", "--layout", "w"), "w"),
        (("layout", "--grid", "x=2", "--layout", "x", "--output", "x.bmp"), "x.bmp must end in .svg or .png"),
        (("plan", *CUBE, "--a", "(z y) x", "--b", "(z x) y"), "fix: B as '(x z) y'"),
        (("plan", *CUBE, "--a", "x y", "--b", "y x", "--phase", "up"), "'up'; it must be one of forward, dgrad, wgrad"),
        (("plan", *CUBE, "--a", "x y", "--b", "y x", "--shape", "8,8"), "M, K, N"),
        (("plan", *CUBE, "--a", "x y"), "--b"),
        ((*SCHEDULE, "--chunks", 3), "fix: 2 or 4 chunks"),
        ((*SCHEDULE, "--tokens", 8190), "fix: tokens=8192"),
        ((*SCHEDULE, "--product", "left"), "not one of block, up, down"),
        ((*SCHEDULE, "--hardware", "h101-ib"), "did you mean h100-ib"),
        (("schedule", "--grid", "w=2"), "a block uses dp, z, x, y"),
    ],
)
def test_wrong_use_is_explained(arguments, message):
    result = show(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("product", ["up", "down"])
def test_one_product_alone(product):
    """The first product of a block too, which nothing follows here."""
    result = show(*SCHEDULE, "--product", product, "--json", "-")
    assert result.exit_code == 0, result.stderr
    tasks = json.loads(result.stdout)["tasks"]
    assert {task["product"] for task in tasks} == {0}
    multiplied = {task["tensor"] for task in tasks if task["lane"] == "compute" and task["what"] == "multiply"}
    assert multiplied == {"C", "dA", "dB"}
    assert {task["tensor"] for task in tasks if task["lane"] != "compute"} == {"A", "B", "C", "dA", "dB", "dC"}


def spans_of(report, lane):
    return sorted((task["begin_ms"], task["end_ms"]) for task in report["tasks"] if task["lane"] == lane)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_schedule_as_a_timeline(chunks):
    """One thing at a time on every lane, every collective of the step on its axis's, as long as predicted."""
    result = show(*SCHEDULE, "--chunks", chunks, "--tasks", "--json", "-")
    assert result.exit_code == 0, result.output
    assert result.stderr.isascii() and max(map(len, result.stderr.splitlines())) <= 100
    lines = result.stderr.splitlines()
    for lane in ("compute", "link z", "link x", "link y"):
        assert len([line for line in lines if line.startswith(f"{lane:10}")]) == 2, "forward and backward"
    report = json.loads(result.stdout)
    grid = Grid(z=2, x=2, y=2)
    request = Request((Block.mlp(8192, 4096, 16384),), 8, Hardware.load("h100-ib"), chunks=chunks)
    assert report["step_ms"] == pytest.approx(float(predict(request, grid).total) * 1e3)
    for lane in ("compute", "z", "x", "y"):
        spans = spans_of(report, lane)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(spans)), lane
    moved = [
        (task["lane"], task["what"], task["tensor"], task["product"])
        for task in report["tasks"]
        if task["lane"] != "compute" and task["chunk"] in (None, 0)
    ]
    expected = {
        (step.axes[0], step.kind, tensor, product)
        for product, plan in enumerate(block_layouts(grid, "3d").plans())
        for tensor, steps in plan.relayouts.items()
        for step in steps
        if tensor != "bias" and tensor != "dbias"
    }
    assert len(moved) == len(set(moved)) and set(moved) == expected
    multiplied = [task for task in report["tasks"] if task["what"] == "multiply"]
    assert len(multiplied) == 2 * 3 * chunks, "C and dA in chunks, dB in as many pieces"
    begins = {(task["tensor"], task["product"], task["lane"]): task["begin_ms"] for task in report["tasks"][::-1]}
    assert begins["B", 1, "z"] < begins["C", 1, "compute"], "a weight is gathered before its product"


def test_one_product_of_a_schedule_and_its_colours():
    spans = schedule(Grid(y=4), (64, 16, 32), Hardware.load("cpu"), dtype="float32", product="down")
    assert {span.product for span in spans} == {0}
    moved = [(span.lane, span.what, span.tensor) for span in spans if span.lane != "compute"]
    assert moved == [("y", "reduce_scatter", "C"), ("y", "all_gather", "dC")]
    coloured = io.StringIO()
    console = Console(file=coloured, force_terminal=True, color_system="truecolor", width=100)
    for text in as_text(spans, 100):
        console.print(text)
    assert coloured.getvalue().count("\x1b[") > 10


@pytest.mark.parametrize("suffix, start", [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_schedule_in_a_file(suffix, start, tmp_path):
    path = tmp_path / f"schedule.{suffix}"
    result = show(*SCHEDULE, "--chunks", 4, "--output", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(start) and path.stat().st_size > 5_000


@pytest.mark.parametrize("command", ["layout", "plan", "schedule"])
def test_help_has_an_example(command):
    result = show(command, "--help")
    assert f"Example: ndtp show {command}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
