"""Which of a product is there first, its rows or its weight, and what the clocks make of it."""

from __future__ import annotations

import numpy as np
import pytest

from ndtp import Grid, Layout, MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.schedule.arrivals import rows_first, weight_in_parts
from ndtp.schedule.chunk_choice import LinkSpeed, Speeds, products_of
from ndtp.schedule.clocks import TimedProduct, replayed, step_seconds
from ndtp.schedule.tasks import Action, Task, forward_tasks

HIDDEN, INNER = 512, 2048
LINKS = Speeds({(kind, axis): LinkSpeed(1e-3, 1 / 25e6) for kind in ("all_gather", "reduce_scatter") for axis in "xyz"})


def block(grid: Grid, scheme: str = "3d", rows: int = 4096):
    sizes = [{"m": rows, "k": HIDDEN, "n": INNER}, {"m": rows, "k": INNER, "n": HIDDEN}]
    return block_layouts(grid, scheme).plans("block"), sizes


@pytest.mark.parametrize(
    "grid, rows, expected",
    [
        (Grid(z=4, y=2), 4096, (False, True)),  # 1.5 MiB of the second weight, 1 MiB of rows
        (Grid(z=4, y=2), 8192, (False, False)),
        (Grid(z=2, y=4), 4096, (False, False)),
        (Grid(z=8), 4096, (True, True)),  # rows stay where they are
        (Grid(z=2, x=2, y=2), 4096, (False, False)),  # and move between the products
        (Grid(x=8), 4096, (False, False)),
    ],
    ids=str,
)
def test_a_product_waits_for_its_weight_where_that_has_more_to_move(grid, rows, expected):
    scheme = "1d-sp" if grid == Grid(x=8) else "3d"
    assert rows_first(*block(grid, scheme, rows)) == expected


def test_c_is_begun_by_a_part_of_the_weight_on_ranks_that_have_rows_of_their_own():
    def axes(grid: Grid, a: str, b: str, **how) -> tuple[str, ...]:
        return weight_in_parts(MatMulPlan(Layout.parse(grid, a), Layout.parse(grid, b), **how))

    cube = Grid(z=2, x=2, y=2)
    assert axes(cube, "(z y) x", "y (x z)", transpose_b=True) == ("z",)
    assert axes(cube, "(z y) x", "(x z) y") == (), "it arrives as one matrix"
    assert axes(cube, "(z y) x", "x y") == (), "nothing arrives"
    assert axes(Grid(z=2), "None None", "None z", transpose_b=True, roles={"z": "n"}) == (), "rows are the same"


@pytest.mark.parametrize("chunks", range(1, 9))
def test_a_weight_behind_the_rows_is_sent_when_they_are_there_and_filled_by_own_parts(chunks):
    tasks = forward_tasks(chunks, (False, False), (False, True))
    last = chunks - 1
    sent, waited = tasks.index(Task(Action.START, "B", None, 1)), tasks.index(Task(Action.WAIT, "B", None, 1))
    begun, half = (tasks.index(Task(Action.MULTIPLY, "C", i)) for i in (0, chunks // 2))
    assert tasks.index(Task(Action.START, "A", last)) < begun, "rows are sent at once"
    assert tasks.index(Task(Action.WAIT, "A", last)) < sent < half, "half of the products hide it"
    own = [tasks.index(Task(Action.OWN, "C", i, 1)) for i in range(chunks)]
    assert tasks.index(Task(Action.MULTIPLY, "C", last)) < own[0] and own[-1] < waited
    assert waited < tasks.index(Task(Action.MULTIPLY, "C", 0, 1))


def test_own_parts_of_a_weight_hide_it():
    """Two gathers of 10 s one after the other; four products of 1 s, of which half need no other's part."""
    gathers = {("forward", "B"): [("all_gather", ("z",), 10)]}
    speeds = Speeds({("all_gather", "z"): LinkSpeed(0.0, 1.0)})
    first, second = (TimedProduct(gathers, 2.0, 1.0, 0.0, own_weight=0.5, chained=chained) for chained in (True, False))
    assert replayed([first, second], speeds, 2).forward == pytest.approx(10 + 10 + 0.5 * 2)
    without = [TimedProduct(each.messages, 2.0, 1.0, 0.0, chained=each.chained) for each in (first, second)]
    assert replayed(without, speeds, 2).forward == pytest.approx(10 + 10 + 2)


def test_grids_of_other_orders_are_timed_together_as_they_are_alone():
    grids = [Grid(z=4, y=2), Grid(z=2, y=4), Grid(z=8), Grid(y=8)]
    alone = [products_of(*block(grid), 4, LINKS, 4) for grid in grids]
    keys = [list(dict.fromkeys(key for each in alone for key in each[p].messages)) for p in (0, 1)]

    def over_y_and_z(p: int, key: tuple[str, str]) -> list[tuple[str, tuple[str, ...], np.ndarray]]:
        """What a tensor moves on each grid: by two kinds of collectives over two axes, of which a grid has one."""
        found: dict[tuple[str, tuple[str, ...]], np.ndarray] = {}
        for g, products in enumerate(alone):
            for kind, axes, received in products[p].messages.get(key, []):
                found.setdefault((kind, tuple(axes)), np.zeros(len(grids)))[g] = received
        return [(*how, received) for how, received in found.items()]

    together = [
        TimedProduct(
            {key: over_y_and_z(p, key) for key in keys[p]},
            *(np.array([getattr(each[p], name) for each in alone]) for name in ("gemm", "chunk", "after")),
            own=tuple(np.array([each[p].own[i] for each in alone]) for i in (0, 1)),
            own_weight=np.array([each[p].own_weight for each in alone]),
            chained=p == 0,
        )
        for p in (0, 1)
    ]
    links = InTurns(LINKS.links, shares=False)
    seconds = step_seconds(together, links, 4)
    assert seconds == pytest.approx([float(step_seconds(each, links, 4)) for each in alone])


class InTurns(Speeds):
    """The same links, for many grids at once: one collective after the other."""

    def seconds(self, collective, axes, received):
        ((link,),) = {(link,) for link in self.links.values()}
        return np.where(received > 0, link.latency + received * link.per_byte, 0.0)

    occupied = seconds
