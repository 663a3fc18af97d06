"""The wire as pure numbers: names, bytes with scales, the same in any chunks, and the planner's beside the plans'."""

import numpy as np
import pytest

from ndtp.algebra.grid import Grid
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.steps import Step
from ndtp.algebra.wire import FORMATS, Wire, coded_elements, part_of, step_bytes
from ndtp.errors import GridError
from ndtp.planner.block_cost import Block, Grids, num_bytes
from ndtp.planner.search import plan, wire_savings


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ("fp4", "'fp4', which is none of"),
        (8, "neither a dtype nor a dict"),
        ({"weight": "bf16"}, "names 'weight'"),
        ("weights=fp8,gradient=bf16", "names 'gradient'"),
        ("weights=", "has '', which is none of"),
        ("weights=fp8,weights=int8", "names one of its kinds twice"),
        ("products=fp16", "'fp16' for products, which is none of bf16, fp8"),
        ("error_feedback=yes", "'yes' for error_feedback"),
    ],
)
def test_a_wire_that_is_none_is_refused_with_the_fix(wire, said):
    with pytest.raises(GridError, match=said) as caught:
        Wire.of(wire)
    assert "fix: wire='bf16'" in str(caught.value)


def test_names_of_kinds():
    assert Wire.of("fp8") == Wire("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "fp8_e5m2")
    assert Wire.of({"gradients": "bf16"}) == Wire.of("gradients=bf16") == Wire(None, None, "bf16", "bf16")
    assert Wire.of({"weights": "int8"}).format("activations") is None
    few = Wire.of({"weights": "int8"}, "fp8-rowwise")
    assert (few.weights, few.activations, few.weight_gradients, few.products) == ("int8", "fp8_e4m3", "bf16", "fp8")
    assert Wire.of(few, "bf16") == few and Wire.of({"gradients": None}, "bf16").weight_gradients is None
    with pytest.raises(GridError, match="recipe='fp4' is none of bf16, fp8-rowwise"):
        Wire.of(None, "fp4")
    recipes = ("recipe=bf16", "recipe=fp8-rowwise", "weights=fp8,products=fp8", "gradients=fp8,error_feedback=true")
    for written in ("bf16", "fp8", "int8", "weights=fp8,gradients=bf16", *recipes):
        assert Wire.of(str(Wire.of(written))) == Wire.of(written), "what is printed can be typed"


def test_rows_and_vectors():
    fp8, bf16 = FORMATS["fp8_e4m3"], FORMATS["bf16"]
    assert fp8.num_bytes((3, 10)) == 3 * (10 + 4) and bf16.num_bytes((3, 10)) == 60
    assert fp8.saves((3, 2), 4) and not fp8.saves((3, 1), 4), "a scale has as many bytes as a number"
    assert fp8.saves((1, 5), 2) and not fp8.saves((1, 4), 2)
    assert bf16.saves((7,), 4) and not fp8.saves((700,), 4), "a vector has no rows"


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_bytes_do_not_depend_on_chunks(kind):
    grid, form = Grid(x=4), FORMATS["int8"]
    step = Step(kind, ("x",), None if kind == "all_reduce" else 1, 0)
    bytes_of = [n * step_bytes(grid, step, (16 // n, 12), 0, 4, form)[0] for n in (1, 2, 4)]
    assert len(set(bytes_of)) == 1
    part, count = part_of(grid, step, (16, 12))
    assert bytes_of[0] == count * part[0] * (part[1] + 4)
    encoded, decoded = coded_elements(grid, (step,), (16, 12), 4, form)
    assert encoded >= 16 * 12 and decoded >= encoded - 48


WRITTEN = (None, "bf16", "fp8", "int8", "weights=fp8,gradients=bf16")


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("written", WRITTEN)
def test_the_planner_counts_what_plans_do(written, itemsize):
    """To the byte, of every grid of eight ranks, dp among its axes."""
    wire, (tokens, hidden, ffn) = Wire.of(written), (64, 128, 256)
    for grid in Grid.all(8, ("dp", "z", "x", "y")):
        up, down = block_layouts(grid, "3d").plans()
        of_plans = up.volume((tokens, hidden, ffn), itemsize, wire)
        of_plans += down.volume((tokens, ffn, hidden), itemsize, wire)
        g = Grids(*(np.array([grid[axis]]) for axis in ("dp", "z", "x", "y")))
        assert int(num_bytes(Block.mlp(tokens, hidden, ffn), g, itemsize, wire=wire)[0]) == of_plans.total, grid
        if wire is None:
            plain = up.volume((tokens, hidden, ffn)) + down.volume((tokens, ffn, hidden))
            assert of_plans.total == plain.elements * itemsize == of_plans.elements * itemsize


def test_a_plan_of_few_bytes():
    asked = {"tokens": 8192, "hidden": 4096, "ffn": 16384, "ranks": 16}
    best, few = plan(**asked)[0], plan(**asked, wire="fp8")[0]
    assert few.volume_bytes < 0.6 * best.volume_bytes and few.step_ms < best.step_ms
    assert few.arguments["wire"] == "fp8" and "tensors travel as fp8" in few.why
    first, *others = wire_savings(best)
    assert first["volume_bytes"] == best.volume_bytes and first["step_ms"] == pytest.approx(best.step_ms)
    assert [each["wire"] for each in others] == ["fp8", "int8"], "bf16 computes in as many bytes"
    assert all(each["volume_bytes"] < 0.6 * best.volume_bytes for each in others)
