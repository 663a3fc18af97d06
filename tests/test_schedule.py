"""Schedules as data: no process is needed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest

from ndtp import Grid, Layout, MatMulPlan
from ndtp.schedule import LOOKAHEAD, RowChunks, Task, backward_tasks, forward_tasks

CHUNKS = [1, 2, 3, 5]
BACKWARD = [
    {"dgrad": dgrad, "wgrad": wgrad, "bias": bias, "regather": regather}
    for dgrad, wgrad, bias in product((False, True), repeat=3)
    for regather in ((), ("a",), ("b",), ("a", "b"))
    if dgrad or wgrad or bias
]


def plan_of(a: str, b: str, chunks: int = 0, **sizes: int) -> MatMulPlan:
    grid = Grid(sizes)
    return MatMulPlan(Layout.parse(grid, a), Layout.parse(grid, b), chunks=chunks)


def check_causality(tasks: list[Task], open_at_the_end: set[str]) -> None:
    """Nothing is waited for before it was started, nor twice; nothing started is forgotten."""
    state: dict[tuple[str, int | None], str] = {}
    for task in tasks:
        key = task.tensor, task.chunk
        if task.action == "start":
            assert state.get(key) in (None, "multiplied"), f"{task}: started twice"
            state[key] = "started"
        elif task.action == "wait":
            assert state.get(key) == "started", f"{task}: was not started"
            state[key] = "waited"
        elif task.action == "multiply":
            assert key not in state, f"{task}: multiplied twice"
            state[key] = "multiplied"
    left = {tensor for (tensor, _), now in state.items() if now == "started"}
    assert left == open_at_the_end
    assert "multiplied" not in state.values()


@pytest.mark.parametrize("chunks", CHUNKS)
def test_forward_is_causal_and_multiplies_every_chunk_once(chunks):
    tasks = list(forward_tasks(chunks))
    check_causality(tasks, set())
    assert [task.chunk for task in tasks if task.action == "multiply"] == list(range(chunks))
    assert tasks[0] == Task("start", "B"), "the weight goes first"


@pytest.mark.parametrize("options", BACKWARD, ids=str)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_backward_is_causal_and_leaves_the_weights_gradients_in_flight(chunks, options):
    tasks = list(backward_tasks(chunks, **options))
    expected = {name for name, wanted in (("dB", options["wgrad"]), ("dbias", options["bias"])) if wanted}
    check_causality(tasks, expected)
    starts = Counter(task.tensor for task in tasks if task.action == "start")
    assert starts["dC"] == chunks, "one gather of dC serves dgrad and wgrad"


@pytest.mark.parametrize("chunks", CHUNKS)
def test_gathers_in_flight_are_bounded_and_overlap_products(chunks):
    flying, most, hidden = 0, 0, 0
    for task in forward_tasks(chunks):
        if task.tensor == "A":
            flying += {"start": 1, "wait": -1}[task.action]
            most = max(most, flying)
        hidden += task.action == "multiply" and flying > 0
    assert most == min(LOOKAHEAD, chunks)
    assert hidden == chunks - 1, "every product but the last has a gather beside it"


def test_the_scatter_of_dgrad_flies_while_the_weights_gradient_is_multiplied():
    tasks = list(backward_tasks(2, dgrad=True, wgrad=True, bias=False, regather=()))
    started = tasks.index(Task("start", "dA", 1))
    assert started < tasks.index(Task("multiply", "dB")) < tasks.index(Task("wait", "dA", 0))


def test_the_next_weight_is_gathered_behind_the_gathers_and_before_the_last_product():
    tasks = list(forward_tasks(3))
    prefetch = tasks.index(Task("prefetch", "B"))
    assert max(i for i, task in enumerate(tasks) if task.action == "start" and task.tensor == "A") < prefetch
    assert prefetch < tasks.index(Task("multiply", "C", 2))


def test_tasks_print():
    assert [str(task) for task in forward_tasks(2)][:5] == [
        "start B",
        "start A[0]",
        "start A[1]",
        "wait B",
        "wait A[0]",
    ]


@pytest.mark.parametrize("x,y", [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (4, 6)])
@pytest.mark.parametrize("wanted", [2, 3, 4])
def test_chunks_keep_the_row_order_whatever_the_axis_sizes(x, y, wanted):
    """Gather chunk i of every A shard over y, scatter it over x: row r of C must come from row r of A."""
    plan = plan_of("(z y) x", "(x z) y", wanted, z=2, x=x, y=y)
    rows = x * y * 12 * 2
    chunks = RowChunks.of(plan, {"m": rows}, wanted)
    assert chunks.count == wanted
    a_rows = np.arange(rows // 2).reshape(y, -1)  # one z block: what each y holds
    c_rows = np.full((x, rows // 2 // x), -1)
    for i in range(chunks.count):
        gathered = np.concatenate([shard.reshape(chunks.a_blocks, chunks.count, -1)[:, i].ravel() for shard in a_rows])
        for shard, part in zip(c_rows, gathered.reshape(x, -1), strict=True):
            shard.reshape(chunks.c_blocks, chunks.count, -1)[:, i] = part.reshape(chunks.c_blocks, -1)
    assert np.array_equal(c_rows.ravel(), np.arange(rows // 2))


def test_fewer_chunks_where_rows_do_not_divide():
    plan = plan_of("(z y) x", "(x z) y", 4, z=1, x=2, y=2)
    counts = [RowChunks.of(plan, {"m": rows}, 4).count for rows in (2, 4, 6, 8, 10)]
    assert counts == [1, 2, 3, 4, 1]


def test_one_chunk_where_rows_take_other_moves():
    grid = Grid(x=2)
    moved = MatMulPlan(
        Layout.parse(grid, "None None"), Layout.parse(grid, "None None"), Layout.parse(grid, "x None"), chunks=4
    )
    assert RowChunks.of(moved, {"m": 16}, 4) == RowChunks(1)


def test_interleaved_parallel_asks_for_chunks():
    lay = Layout.over((2, 4, 2), ("x", "y", "interleaved_parallel"))
    plan = MatMulPlan(lay(("x", "interleaved_parallel"), "y"), Layout.over((2, 4), ("x", "y"))("y", "None"))
    assert plan.chunks == 2
    assert plan_of("x None", "None None", x=2).chunks == 1


def test_volume_does_not_depend_on_chunks():
    volumes = [plan_of("(z y) x", "(x z) y", n, z=2, x=2, y=2).volume((64, 8, 8)) for n in (1, 4)]
    assert all(one == other for one, other in pairwise(volumes))
