"""The planner against brute force, the algebra, and its own constraints."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import ndtp
from ndtp import Grid, MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.steps import apply
from ndtp.algebra.volume import Volume, lower_bound
from ndtp.errors import GridError
from ndtp.planner.block_cost import Block, Grids, divides, memory, messages, volume
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import MIB
from ndtp.planner.search import plan, predict

POWERS = [2**n for n in range(11)]
AWKWARD = [6, 12, 24, 100]


def shapes(count, seed=0):
    """Block shapes of all proportions, about half of them powers of two."""
    draw = random.Random(seed)
    for i in range(count):
        sizes = [2 ** draw.uniform(8, 17) for _ in range(3)]
        yield tuple(2 ** round(math.log2(size)) if i % 2 else 120 * max(1, round(size / 120)) for size in sizes)


def brute_force(tokens, hidden, ffn, ranks, itemsize=2):
    """Grid -> step bytes, by the published forward volume, on sizes padded up to what the grid divides."""
    volumes = {}
    for grid in Grid.all(ranks, ("dp", "z", "x", "y")):
        d, z, x, y = grid.shape
        t, h, e = (
            math.ceil(size / part) * part
            for size, part in ((tokens, math.lcm(d * z * x, d * z * y)), (hidden, x * z), (ffn, y * z))
        )
        forward = 2 * ((t * e * (x - 1) + t * h * (y - 1)) // ranks + h * e * (z - 1) // (x * y * z))
        data_parallel = 2 * 2 * (d - 1) * math.ceil(h * e // (x * y * z) / d)
        volumes[d, z, x, y] = (2 * forward + data_parallel) * itemsize
    return volumes


@pytest.mark.parametrize("ranks", [*POWERS, *AWKWARD])
def test_volume_is_the_minimum_over_all_grids(ranks):
    # On one node every rank order is the same, which saves this test the time of comparing them.
    hardware = replace(Hardware.load("h100-ib"), ranks_per_node=1024)
    for shape in shapes(40):
        volumes = brute_force(*shape, ranks)
        best, *others = plan(*shape, ranks, hardware, objective="volume", limit=8)
        key = tuple(best.grid[axis] for axis in ("dp", "z", "x", "y"))
        assert best.volume_bytes == volumes[key] == min(volumes.values()), (shape, best)
        ties = [other for other in others if other.volume_bytes == best.volume_bytes]
        assert all(other.memory_bytes >= best.memory_bytes for other in ties), (shape, best)


def moved(name, plan, shape):
    """(phase, product and tensor, collective, axis) -> elements of every collective of a plan that moves something."""
    sizes = plan.sizes(shape)
    return {
        (move.phase, f"{name} {move.tensor}", step.kind, *step.axes): elements
        for move in plan.moves()
        for step, _, elements in apply(plan.grid, move.steps, plan.start_shape(move.tensor, sizes))
        if step.kind != "slice"
    }


@pytest.mark.parametrize("ranks", [8, 12, 32])
@pytest.mark.parametrize("regather", [(), ("a",), ("a", "b")], ids=str)
def test_closed_form_equals_the_algebra(ranks, regather):
    """Collective by collective: the same phase, tensor and axis, and as many elements; and so their sum."""
    tokens, hidden, ffn = 96 * ranks, 4 * ranks, 12 * ranks
    block, g = Block.mlp(tokens, hidden, ffn), Grids.all(ranks)
    assert divides(block, g, pad=False).sum() > 10
    g = g.take(divides(block, g, pad=False))
    again = int("a" in regather), int("b" in regather)
    closed = list(messages(block, g, *again))
    for i, total in enumerate(volume(block, g, *again)):
        grid = Grid(**{axis: int(getattr(g, axis)[i]) for axis in ("dp", "z", "x", "y")})
        up, down = block_layouts(grid, "3d").plans(regather=regather)
        exact = moved("up", up, (tokens, hidden, ffn)) | moved("down", down, (tokens, ffn, hidden))
        found = {(m.phase, m.tensor, m.collective, m.axis): int(m.elements[i]) for m in closed if m.elements[i]}
        assert found == exact, grid
        assert sum(exact.values()) == total, grid


def moved_on(g, name, plan, shape):
    """As `moved`, on an array of grids: the steps of the plan of a grid with all axes, on the sizes of all of them."""
    grids = SimpleNamespace(size=lambda axes: math.prod(getattr(g, axis) for axis in axes))
    sizes, found = plan.sizes(shape), {}
    for move in plan.moves():
        journey = plan.journeys[move.tensor]
        start = [sizes[letter] // grids.size(axes) for letter, axes in zip(journey.letters, journey.begin, strict=True)]
        for step, _, elements in apply(grids, move.steps, start):
            found[(move.phase, f"{name} {move.tensor}", step.kind, *step.axes)] = elements
    return found


@pytest.mark.parametrize("regather", [(), ("a",), ("a", "b")], ids=str)
def test_closed_form_equals_the_plan_on_all_grids_of_4096_ranks(regather):
    ranks = 4096
    tokens, hidden, ffn = ranks, 2 * ranks, 8 * ranks
    block, g = Block.mlp(tokens, hidden, ffn), Grids.all(ranks)
    assert divides(block, g, pad=False).all() and len(g.dp) == 455
    up, down = block_layouts(Grid(dp=2, z=2, x=2, y=2), "3d").plans(regather=regather)
    exact = moved_on(g, "up", up, (tokens, hidden, ffn)) | moved_on(g, "down", down, (tokens, ffn, hidden))
    again = int("a" in regather), int("b" in regather)
    closed = {(m.phase, m.tensor, m.collective, m.axis): m.elements for m in messages(block, g, *again)}
    closed = {key: elements for key, elements in closed.items() if np.any(elements)}
    assert closed.keys() == exact.keys()
    for key, elements in exact.items():
        assert np.array_equal(closed[key], elements), key
    assert np.array_equal(sum(exact.values()), volume(block, g, *again))


@pytest.mark.parametrize("scheme", ["1d", "1d-sp", "2d", "2d-features"])
def test_no_named_scheme_moves_less(scheme):
    """The search covers the 3D family only; the other schemes must not be able to beat it."""
    sizes = tokens, hidden, ffn = 4096, 512, 2048
    best = plan(*sizes, 16, objective="volume", limit=1)[0]
    for grid in Grid.all(16, ("x", "y")):
        up, down = block_layouts(grid, scheme).plans()
        exact: Volume = up.volume((tokens, hidden, ffn)) + down.volume((tokens, ffn, hidden))
        assert exact.elements * 2 >= best.volume_bytes


@pytest.mark.parametrize("z, x, y", [(2, 2, 2), (4, 2, 1), (3, 2, 5), (1, 4, 2), (8, 1, 1), (4, 4, 4)])
@pytest.mark.parametrize("deep", [False, True])
def test_single_product_meets_the_lower_bound(z, x, y, deep):
    """Where local blocks can be cubes, or dims that are shorter than that stay whole, the grid is the ideal one."""
    side = 4 * z * x * y
    m, k, n = z * side, x * side, y * side
    if deep:  # a contracted dim that is short and whole: the 2D (or 1D) regime
        x, k = 1, side // 4
    ranks = z * x * y
    volumes = []
    for grid in Grid.all(ranks):
        product = MatMulPlan(block_layouts(grid, "3d").input, block_layouts(grid, "3d").up_weight, transpose_b=True)
        try:
            volumes.append(product.volume((m, k, n), dgrad=False, wgrad=False).elements)
        except ndtp.LayoutError:
            continue
    assert min(volumes) == pytest.approx(lower_bound(m, n, k, ranks), rel=1e-12)


def test_recorded_volumes():
    """Forward MiB per rank in bf16 for 8192, 4096, 16384: 80 at P = 8, 72 at 16, 34 at 64; half of a step's."""
    for ranks, mib in ((8, 80), (16, 72), (64, 34)):
        assert plan(8192, 4096, 16384, ranks, objective="volume")[0].volume_bytes == 2 * mib * MIB


def test_answers_each_kind_where_it_is_best():
    def kind(tokens, ranks, **arguments):
        return plan(tokens, 4096, 16384, ranks, objective="volume", **arguments)[0].kind

    assert kind(8192, 1) == "one rank"
    assert kind(8192, 4) == "1D"  # 2D moves 160 MiB against 96
    assert kind(8192 * 64, 4) == "FSDP"  # activations dwarf the weights
    assert kind(2048, 64) == "2D"
    assert kind(8192, 64) == "3D"
    assert plan(8192 * 64, 4096, 16384, 4, objective="volume", fixed={"z": 1})[0].kind == "data parallel"


def test_bound_ratio():
    """The 3D grid for P = 64 is ideal for both products; half of it for every rank is not."""
    best = plan(8192, 4096, 16384, 64, objective="volume")[0]
    assert best.bound_ratio == pytest.approx(1.0)
    bound = 2 * sum(lower_bound(*shape, 64) for shape in ((8192, 16384, 4096), (8192, 4096, 16384))) * 2
    worst = plan(8192, 4096, 16384, 64, objective="volume")[-1]
    assert worst.bound_ratio == pytest.approx(worst.volume_bytes / bound)
    assert worst.bound_ratio > 2


def test_every_grid_is_listed_once_and_sorted():
    for objective, key in (("volume", "volume_bytes"), ("memory", "memory_bytes"), ("time", "step_ms")):
        plans = plan(8192, 4096, 16384, 24, objective=objective)
        grids = {tuple(p.grid[axis] for axis in ("dp", "z", "x", "y")) for p in plans}
        assert len(grids) == len(plans) == len(Grid.all(24, ("dp", "z", "x", "y")))
        values = [getattr(p, key) for p in plans]
        assert objective == "time" or values == sorted(values)
        assert all(p.grid.num_ranks == 24 for p in plans)
    slower = [value for value in values if value > 1.01 * min(values)]
    assert values[-len(slower) :] == sorted(slower)  # the others are as fast as the fastest


def test_of_grids_that_are_as_fast_as_predictions_tell_the_one_of_least_memory_is_first():
    """A tenth of a percent is less than any prediction is worth; two fifths of the memory are not."""
    first, *others = plan(8192, 8192, 28672, 64)
    tied = [p for p in others if p.step_ms < first.step_ms]
    assert tied and all(p.step_ms * 1.01 > first.step_ms and p.memory_bytes > first.memory_bytes for p in tied)


def test_prediction_of_one_grid_is_that_of_the_search():
    best = plan(8192, 4096, 16384, 64)[0]
    assert predict(best.request, best.grid).total * 1e3 == pytest.approx(best.step_ms)
    turned = Grid(dict(reversed([(axis, best.grid[axis]) for axis in best.grid])))
    assert predict(best.request, turned).total * 1e3 > best.step_ms


def test_layers_gated_and_attention_add_up():
    one = plan(8192, 4096, 14336, 16, gated=True, heads=32, kv_heads=8, fixed={"x": 2, "y": 4})[0]
    many = plan(8192, 4096, 14336, 16, gated=True, heads=32, kv_heads=8, fixed={"x": 2, "y": 4}, layers=10)[0]
    assert many.volume_bytes == 10 * one.volume_bytes
    assert many.gemm_ms == pytest.approx(10 * one.gemm_ms)
    assert one.step_ms < many.step_ms <= 10 * one.step_ms * (1 + 1e-9)
    parameters = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert sum(block.parameters for block in one.request.blocks) == parameters


def test_heads_limit_y_and_are_not_padded():
    """Those of queries; fewer heads of keys are gathered, as long as y divides their features."""
    plans = plan(8192, 4096, 16384, 64, heads=32, kv_heads=8, objective="volume", limit=64)
    assert {p.grid["y"] for p in plans} == {1, 2, 4, 8, 16, 32}
    plans = plan(8192, 4096, 16384, 64, heads=32, kv_heads=1, head_size=8, objective="volume", limit=64)
    assert {p.grid["y"] for p in plans} == {1, 2, 4, 8}


def test_memory_limit_trades_volume_for_memory():
    """Of many layers backward may gather again what forward gathered; of one layer that would save nothing."""

    def cube(**arguments):
        return plan(8192, 4096, 16384, 8, objective="volume", fixed={"x": 2, "y": 2, "z": 2}, **arguments)[0]

    free = cube(layers=24)
    assert free.regather == ()
    tight = cube(layers=24, memory_limit_gib=free.memory_bytes / 2**30 * 0.97)
    assert tight.regather
    assert tight.memory_bytes < free.memory_bytes
    assert tight.volume_bytes > free.volume_bytes
    with pytest.raises(GridError, match=r"the least that any needs is \d"):
        plan(8192, 4096, 16384, 8, memory_limit_gib=0.01)


def test_memory_of_one_rank():
    """Weights, gradients and Adam's state: 16 bytes a parameter in bf16; activations in, between and out of `up`."""
    m = memory(Block.mlp(1024, 64, 256), Grids(1, 1, 1, 1), 2)
    assert (m.weights, m.gradients, m.optimizer) == (2 * 2 * 64 * 256, 2 * 2 * 64 * 256, 12 * 2 * 64 * 256)
    assert m.activations == 2 * 1024 * (64 + 256 + 256)
    fp32 = memory(Block.mlp(1024, 64, 256), Grids(1, 1, 1, 1), 4)
    assert fp32.optimizer == 8 * 2 * 64 * 256


def test_constraints():
    plans = plan(8192, 4096, 16384, 64, fixed={"dp": 2, "z": 4})
    assert {(p.grid["dp"], p.grid["z"]) for p in plans} == {(2, 4)}
    for p in plan(8192, 4096, 16384, 64, tp_within_node=True):
        assert p.grid["x"] * p.grid["y"] <= 8
        for rank in range(0, 64, 7):
            assert len({peer // 8 for peer in p.grid.group(rank, ("x", "y"))}) == 1, p.grid
    plans = plan(12288, 4096, 12288, 12, pad=False)
    assert plans and not any(p.pad for p in plans)
    assert any(p.pad for p in plan(12288, 4096, 12288, 12))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokens": 0}, "tokens=0; it must be an integer from 1 to 1,000,000,000,000,000"),
        ({"ranks": -4}, "ranks=-4"),
        ({"objective": "speed"}, "objective='speed'; it must be one of time, volume, memory"),
        ({"dtype": "int7"}, "dtype='int7'; it must be one of float32"),
        ({"fixed": {"q": 2}}, "fixed has an entry 'q'; its names must be one of dp, z, x, y"),
        ({"fixed": {"x": 3}}, "no grid of 8 ranks has x=3\n  fix: sizes whose product divides 8 .* or 6 or 9 ranks"),
        ({"ranks": 7, "pad": False}, "no grid of 7 ranks divides tokens=8192.*\n  fix: 4 or 8 ranks\n.*tokens 8190"),
        ({"hardware": "h100-ip"}, "did you mean h100-ib"),
        ({"tp_within_node": True, "fixed": {"y": 8, "x": 1}, "ranks": 32, "hardware": "cpu"}, "inside a node of 1"),
    ],
)
def test_errors_name_what_would_work(arguments, message):
    sizes = {"tokens": 8192, "hidden": 4096, "ffn": 16384, "ranks": 8}
    with pytest.raises(GridError, match=message):
        plan(**(sizes | arguments))


def test_why_is_one_sentence_with_the_numbers():
    best = plan(8192, 4096, 16384, 64, objective="volume")[0]
    assert best.why.startswith("3D receives 68 MiB a step and rank, 3.71 times less than 1D's 252 MiB; ")
    assert best.why.endswith(".") and "\n" not in best.why
    assert "1D optimum" in plan(8192, 4096, 16384, 4, objective="volume")[0].why
    assert json.loads(json.dumps(best.as_dict()))["grid"] == {"dp": 1, "z": 4, "x": 2, "y": 8}


def test_axis_that_moves_most_stays_in_the_node():
    """With slow links between nodes the ranks of a node share the axis that moves more."""
    sizes = {"dp": 8, "z": 1, "x": 1, "y": 8}
    many_tokens = plan(8192 * 16, 4096, 16384, 64, hardware="h100-eth", fixed=sizes)[0]
    few_tokens = plan(64, 4096, 16384, 64, hardware="h100-eth", fixed=sizes)[0]
    assert many_tokens.grid.nontrivial(many_tokens.grid.names) == ("dp", "y")
    assert few_tokens.grid.nontrivial(few_tokens.grid.names) == ("y", "dp")
