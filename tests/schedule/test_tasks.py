"""Schedules as data: no process is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from ndtp import Grid, Layout, MatMulPlan
from ndtp.schedule.tasks import (
    Action,
    RowChunks,
    Task,
    Wanted,
    backward_tasks,
    first_deferred,
    forward_tasks,
    pieces,
)

CHUNKS = [1, 2, 3, 5]
MANY = range(1, 10)
PRODUCTS = [1, 2, 3]
WANTED = [
    Wanted(dgrad, wgrad, bias, regather)
    for dgrad, wgrad, bias in product((False, True), repeat=3)
    for regather in ((), ("a",), ("b",), ("a", "b"))
    if dgrad or wgrad or bias
]


def plan_of(a: str, b: str, chunks: int = 0, **sizes: int) -> MatMulPlan:
    grid = Grid(sizes)
    return MatMulPlan(Layout.parse(grid, a), Layout.parse(grid, b), chunks=chunks)


def backward_alone(chunks: int, wanted: tuple[Wanted, ...] = (Wanted(),)) -> list[Task]:
    """Where nothing follows that deferred pieces could be left to."""
    tasks = []
    for task in backward_tasks(chunks, wanted):
        actions = (Action.MULTIPLY, Action.START) if task.action is Action.DEFER else (task.action,)
        tasks += [task._replace(action=action) for action in actions]
    return tasks


def check_causality(tasks: Sequence[Task], chunks: int, open_at_the_end: set[tuple[str, int]]) -> None:
    """Nothing is used before it is there, started twice, forgotten, or used when it was let go."""
    flying, there, done = set(), set(), set()
    backward = any(task.tensor == "dC" for task in tasks)
    started = {(task.tensor, task.product) for task in tasks if task.action is Action.START}
    taken = set()  # what activations are made of, by the backward of the one that comes last
    for task in tasks:
        key = task.tensor, task.product, task.chunk
        every = [(task.tensor, task.product, i) for i in range(chunks)]
        if task.action is Action.START:
            assert key not in flying and key not in there, f"{task}: started twice"
            flying.add(key)
        elif task.action is Action.WAIT:
            assert key in flying, f"{task}: was not started"
            flying.remove(key)
            there.add(key)
        elif task.action in (Action.OWN, Action.MULTIPLY):
            operand = {"C": "A", "dA": "dC", "dB": "dC", "dbias": "dC"}[task.tensor]
            if task.tensor == "dB" and ("A", task.product) in started:
                again = {("A", task.product, i) for i in range(chunks)}
                assert again <= there, f"{task}: not all of A is there again"
            wanted = [(operand, task.product, i) for i in ([task.chunk] if task.chunk is not None else range(chunks))]
            if task.action is Action.OWN:
                on_its_way, here = set(wanted), {("B", task.product, None)}
                if ("B", task.product, None) in flying:
                    on_its_way, here = here, on_its_way
                assert on_its_way <= flying, f"{task}: there is nothing to hide"
                assert here <= there or backward, f"{task}: there is nothing to multiply"
            else:
                assert set(wanted) <= there, f"{task}: not all of {operand} is there"
                assert key not in done, f"{task}: multiplied twice"
                done.add(key)
        elif task.action is Action.ACTIVATE and (task.tensor == "dC" or not backward):
            source = ("C", task.product - 1) if task.tensor == "A" else ("dA", task.product + 1)
            assert (*source, task.chunk) in there, f"{task}: {source} is not there"
            if task.tensor == "dC":
                taken.add((task.product, task.chunk))
        elif task.action is Action.ACTIVATE:
            assert (task.product - 1, task.chunk) not in taken, f"{task}: what it is made of is gone"
        elif task.action is Action.RELEASE:
            there -= {key, *(every if task.chunk is None else ())}
    assert {(tensor, p) for tensor, p, _ in flying} == open_at_the_end


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("chunks", MANY)
def test_forward_is_causal_and_multiplies_every_chunk_once(chunks, products):
    for rows_first in product((False, True), repeat=products):
        tasks = forward_tasks(chunks, (True,) * products, rows_first)
        check_causality(tasks, chunks, {("bias", p) for p in range(products)})
        multiplied = [(task.product, task.chunk) for task in tasks if task.action is Action.MULTIPLY]
        assert sorted(multiplied) == [(p, i) for p in range(products) for i in range(chunks)]
        for p in range(1, products):  # a product is two chunks behind the one that feeds it, or follows all of it
            for i in range(chunks):
                before = chunks - 1 if rows_first[p] else min(i + 1, chunks - 1)
                assert multiplied.index((p - 1, before)) < multiplied.index((p, i))
        assert tasks[0] == Task(Action.START, "B"), "the weight goes first"


@pytest.mark.parametrize("products", PRODUCTS)
def test_backward_is_causal_and_leaves_the_weights_gradients_in_flight(products):
    for wanted, rest, chunks in product(WANTED, ((), ("a",), ("b",), ("a", "b")), MANY):
        every = (wanted, *(replace(wanted, dgrad=True, regather=rest) for _ in range(products - 1)))
        tasks = backward_alone(chunks, every)
        left = {("dB", p) for p in range(products) if wanted.wgrad} | {
            ("dbias", p) for p in range(products) if wanted.bias
        }
        check_causality(tasks, chunks, left)
        starts = Counter((task.tensor, task.product) for task in tasks if task.action is Action.START)
        for p in range(products):
            assert starts["dC", p] == chunks, "one gather of dC serves dgrad and wgrad"


def test_backward_stops_where_nothing_more_is_wanted():
    frozen = backward_alone(2, (Wanted(False, False), Wanted(False, True)))
    assert {task.product for task in frozen} == {1}
    assert not any(task.tensor == "dA" for task in frozen)


@pytest.mark.parametrize("chunks", [*CHUNKS, 8])
def test_gathers_in_flight_are_bounded_and_overlap_products(chunks):
    flying, most, hidden = 0, 0, 0
    for task in forward_tasks(chunks):
        if task.tensor == "A" and task.action in (Action.START, Action.WAIT):
            flying += {Action.START: 1, Action.WAIT: -1}[task.action]
            most = max(most, flying)
        hidden += task.action is Action.MULTIPLY and flying > 0
    assert most == min(max(2, 3 * chunks // 8), chunks)
    assert hidden == chunks - 1, "every product but the last has a gather beside it"


def test_the_ranks_own_part_is_multiplied_while_the_first_chunk_is_in_flight():
    for tasks, result, operand in ((forward_tasks(4), "C", "A"), (backward_alone(4), "dA", "dC")):
        own, wait = tasks.index(Task(Action.OWN, result, 0)), tasks.index(Task(Action.WAIT, operand, 0))
        assert tasks.index(Task(Action.START, operand, 0)) < own < wait < tasks.index(Task(Action.MULTIPLY, result, 0))


def test_a_chunk_enters_the_second_product_before_the_first_is_done():
    tasks = forward_tasks(4, (True, True))
    for i in range(3):
        entered = tasks.index(Task(Action.START, "A", i, 1))
        assert tasks.index(Task(Action.ACTIVATE, "A", i, 1)) < entered
        assert entered < tasks.index(Task(Action.MULTIPLY, "C", max(0, i - 1), 1)), "a product lies between"
    assert tasks.index(Task(Action.START, "A", 0, 1)) < tasks.index(Task(Action.MULTIPLY, "C", 2))
    backward = backward_alone(4, (Wanted(), Wanted()))
    assert backward.index(Task(Action.START, "dC", 0, 0)) < backward.index(Task(Action.MULTIPLY, "dA", 2, 1))


def test_the_second_weight_is_gathered_while_the_first_product_computes():
    for chunks in CHUNKS:
        tasks = forward_tasks(chunks, (False, False))
        assert tasks.index(Task(Action.START, "B", None, 1)) < tasks.index(Task(Action.MULTIPLY, "C", chunks - 1))
        again = backward_alone(chunks, (Wanted(regather=("b",)),) * 2)
        assert again.index(Task(Action.START, "B", None, 0)) < again.index(Task(Action.MULTIPLY, "dA", chunks - 1, 1))


def test_the_scatter_of_a_chunk_leaves_while_later_chunks_are_multiplied():
    """The second product begins before the first one ends, forward and backward, so that no link idles."""
    forward = forward_tasks(4, (False, False))
    assert forward.index(Task(Action.START, "C", 0, 1)) < forward.index(Task(Action.MULTIPLY, "C", 3))
    backward = backward_alone(4, (Wanted(), Wanted()))
    assert backward.index(Task(Action.START, "dA", 0)) < backward.index(Task(Action.MULTIPLY, "dA", 3, 1))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_weight_gradients_are_multiplied_while_something_flies(chunks):
    tasks = backward_alone(chunks, (Wanted(), Wanted()))
    for p in (0, 1):
        at = tasks.index(Task(Action.MULTIPLY, "dB", 0 if chunks > 1 else None, p))
        for j in range(1, chunks):
            assert tasks.index(Task(Action.START, "dB", j - 1, p)) < tasks.index(Task(Action.MULTIPLY, "dB", j, p))
        flying = Counter()
        for task in tasks[:at]:
            flying[task.tensor, task.product] += {Action.START: 1, Action.WAIT: -1}.get(task.action, 0)
        assert flying["dA", 0] + flying["dC", 0] + flying["dA", 1] > 0, f"nothing hides behind dB of product {p}"


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_second_collective_starts_a_whole_product_after_the_first(chunks):
    work, started, advanced = 0, {}, 0
    for task in backward_tasks(chunks, (Wanted(bias=True),) * 3):
        key = task.product, task.chunk
        if task.action is Action.MULTIPLY and task.tensor != "dbias":
            work += chunks if task.chunk is None else 1
        elif task.tensor == "dB" and task.action is Action.START:
            started[key] = work
        elif task.action is Action.START_NEXT:
            assert work - started.pop(key) == chunks
        elif task.action is Action.ADVANCE:
            assert work == chunks, "so is what earlier chains left"
            advanced += 1
    assert advanced == 1
    kept = pieces(chunks)[: first_deferred(chunks)]
    assert started == {(0, j): work - len(kept) + 1 + (j or 0) for j in kept}, "the next chain's"


@pytest.mark.parametrize("products", PRODUCTS)
def test_sums_over_ranks_with_other_rows_come_in_one_order_whatever_the_chunks(products):
    """Ranks of `dp` may have other numbers of rows, and with them other numbers of chunks."""
    kinds = [Wanted(dgrad, wgrad, True, again, whole) for dgrad in (True, False) for wgrad in (True, False)
             for again in ((), ("a", "b")) for whole in (True, False)]  # fmt: skip

    def is_over_dp(task):
        if task.tensor == "dB" and task.action in (Action.START, Action.START_NEXT):
            return wanted[task.product].whole
        return task.action is Action.ADVANCE or (task.action, task.tensor) == (Action.START, "dbias")

    for wanted in product(kinds, repeat=products):
        orders = {
            tuple(
                (task.action, task.tensor, task.product) for task in backward_tasks(chunks, wanted) if is_over_dp(task)
            )
            for chunks in (1, 2, 3, 5)
        }
        assert len(orders) == 1, (wanted, orders)


def test_the_next_weight_is_gathered_behind_the_gathers_and_before_the_last_product():
    for tasks, operand, result in ((forward_tasks(3), "A", "C"), (backward_tasks(3), "dC", "dA")):
        prefetch = tasks.index(Task(Action.PREFETCH, "B"))
        assert (
            max(i for i, task in enumerate(tasks) if task.action is Action.START and task.tensor == operand) < prefetch
        )
        assert prefetch < tasks.index(Task(Action.MULTIPLY, result, 2))


def test_tasks_print():
    assert [str(task) for task in forward_tasks(2)][:6] == [
        "start B",
        "wait B",
        "start A[0]",
        "start A[1]",
        "own C[0]",
        "wait A[0]",
    ]
    assert [str(task) for task in forward_tasks(1)][:3] == ["start B", "start A[0]", "wait B"]
    assert str(Task(Action.MULTIPLY, "C", 1, 1)) == "multiply C'[1]"


@pytest.mark.parametrize("x,y", [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (4, 6)])
@pytest.mark.parametrize("wanted", [2, 3, 4])
def test_chunks_keep_the_row_order_whatever_the_axis_sizes(x, y, wanted):
    """Gather chunk i of every A shard over y, scatter it over x: row r of C must come from row r of A."""
    plan = plan_of("(z y) x", "(x z) y", wanted, z=2, x=x, y=y)
    rows = x * y * 12 * 2
    chunks = RowChunks.of([plan], [{"m": rows, "k": 16, "n": 16}], wanted)[0]
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
    assert [count_of([plan], wanted=4, m=rows) for rows in (2, 4, 6, 8, 10)] == [1, 2, 3, 4, 1]


def count_of(plans: Sequence[MatMulPlan], wanted: int, m: int = 16, k: int = 16, n: int = 16) -> int:
    return RowChunks.of(plans, [{"m": m, "k": k, "n": n} for _ in plans], wanted)[0].count


def test_any_number_may_be_asked_for():
    plan = plan_of("(z y) x", "(x z) y", z=1, x=2, y=2)
    assert [count_of([plan], wanted, m=1536) for wanted in (10**9, 768, 767)] == [768, 768, 384]
    assert count_of([plan], 10**9, m=0) == 1


def test_fewer_chunks_where_an_all_reduce_would_send_more_in_chunks():
    """A rank sums a block that is rounded up: 3 of 6 x 2 elements, and 3 x 1 of three chunks, but 6 x 1 of six."""
    plan = plan_of("None x", "x None", x=4)
    assert [count_of([plan], 12, m=m, n=n) for m, n in ((6, 2), (12, 2), (12, 4), (12, 5), (1, 1))] == [3, 6, 12, 3, 1]
    backward = plan_of("None None", "None x", x=4)  # dA, of 2 columns
    assert [count_of([backward], 12, m=m, k=2) for m in (6, 12)] == [3, 6]


def test_rows_that_the_next_product_contracts_are_not_cut():
    grid = Grid(x=2)
    whole, split = Layout.parse(grid, "None None"), Layout.parse(grid, "None x")
    first = MatMulPlan(whole, split, whole)
    assert count_of([first, MatMulPlan(whole, split)], 2) == 2
    assert count_of([first, MatMulPlan(whole, split, transpose_a=True)], 2) == 1


def test_one_chunk_where_rows_take_other_moves():
    grid = Grid(x=2)
    moved = MatMulPlan(
        Layout.parse(grid, "None None"), Layout.parse(grid, "None None"), Layout.parse(grid, "x None"), chunks=4
    )
    assert RowChunks.of([moved], [{"m": 16, "k": 16, "n": 16}], 4) == (RowChunks(1),)


def test_interleaved_parallel_asks_for_chunks():
    lay = Layout.over((2, 4, 2), ("x", "y", "interleaved_parallel"))
    plan = MatMulPlan(lay(("x", "interleaved_parallel"), "y"), Layout.over((2, 4), ("x", "y"))("y", "None"))
    assert plan.chunks == 2
    assert plan_of("x None", "None None", x=2).chunks == 1


def test_volume_does_not_depend_on_chunks():
    volumes = [plan_of("(z y) x", "(x z) y", n, z=2, x=2, y=2).volume((64, 8, 8)) for n in (1, 4)]
    assert all(one == other for one, other in pairwise(volumes))
