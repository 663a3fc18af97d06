"""Stages on grids of their own: which ranks each has, what crosses between them, micro-batches, and what is refused."""

import numpy as np
import pytest

from ndtp import Grid, GridError, Layout, LayoutError
from ndtp.algebra.pipeline_plan import PipelinePlan

FOUR, TWO = Grid(dp=2, x=2), Grid(z=2)


def test_ranks_and_places():
    plan = PipelinePlan([FOUR, TWO, Grid(x=1)], (8, 4))
    assert plan.ranks_of == ((0, 1, 2, 3), (4, 5), (6,)) and plan.places == (0, 1, 2)
    turns = PipelinePlan([FOUR, TWO, Grid(y=4), Grid(x=2)], (8, 4), groups=2)
    assert turns.ranks_of[2:] == ((0, 1, 2, 3), (4, 5)) and turns.places == (0, 1, 0, 1)
    assert turns.stages_of(5) == (1, 3) and turns.stages_of(6) == ()
    assert turns.bubble(4) == pytest.approx(1 / 9) and plan.bubble(4) == pytest.approx(2 / 6)


def test_bytes_of_a_crossing():
    """[8, 4] from halves of features on every half of the rows, to quarters of rows on replicas, and back."""
    plan = PipelinePlan([FOUR, Grid(z=2, y=1, r=2)], (8, 4), layouts=[
        (Layout(FOUR, "dp", "x"),) * 2, (Layout(Grid(z=2, y=1, r=2), "z", None),) * 2,
    ])  # fmt: skip
    assert [plan.volume(rank, 3).elements for rank in range(8)] == 4 * [3 * 8] + 4 * [3 * 16]
    assert plan.volume(4, 3).forward == plan.volume(4, 3).total and plan.volume(0, 3).forward == 0
    assert plan.volume(0, 3, dgrad=False).total == 0
    sent = [plan.crossings[0].sent(rank) for rank in range(4)]
    assert sent == [16] * 4, "each half of a half goes to both replicas"


def test_rows_of_micro_batches():
    whole, layout = np.arange(48).reshape(12, 4), Layout(FOUR, "dp", "x")
    plan = PipelinePlan([FOUR, TWO], (4, 4))
    parts = [plan.rows(whole, 3, layout, rank) for rank in range(4)]
    for i in range(3):
        assert (layout.from_shards([parts[rank][i] for rank in range(4)]) == whole[4 * i : 4 * i + 4]).all()
    assert plan.rows(whole, 2, Layout(FOUR, "dp"), 3)[1].shape == (3, 4), "dims beyond the layout's are whole"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([FOUR, TWO], (6, 4)), {"ranks": [(0, 1, 2, 3), (3, 4)]}, GridError, "share ranks 3, and have others beside"),
        (([FOUR, TWO], (6, 4)), {"ranks": [(0, 1, 2), (3, 4)]}, GridError, "stage 0 .* has 4 ranks, not 0, 1, 2"),
        (([FOUR, TWO], (6, 4)), {"ranks": [(0, 1, 3, 2), (5, 4)]}, GridError, "descend along axis x"),
        (([FOUR, TWO], (6, 4)), {"groups": 3}, GridError, "2 stages on groups=3"),
        (([FOUR, TWO, TWO], (6, 4)), {"groups": 2}, GridError, "groups=2"),
        (([FOUR, TWO], (7, 4)), {"scheme": "1d-sp"}, LayoutError, "stage 0 gives.*\n  fix: pad dim 0 to 8"),
        (([FOUR, TWO], (6, 5, 4)), {}, LayoutError, "stage 0 gives"),
        (([FOUR, TWO], (6, 4)), {"layouts": [(Layout(TWO, "z", None),) * 2] * 2}, LayoutError, "stage 0 is on grid"),
        (([FOUR, TWO], [(6, 4)] * 3), {}, LayoutError, "2 stages and 3 of shape"),
        (([], (6, 4)), {}, GridError, "no stages"),
    ],
)
def test_what_is_refused(arguments, options, error, words):
    with pytest.raises(error, match=words):
        PipelinePlan(*arguments, **options)


def test_a_batch_that_does_not_divide():
    with pytest.raises(LayoutError, match="5 micro-batches do not divide a batch of 12\n  fix: a batch of 15"):
        PipelinePlan([FOUR, TWO], (4, 4)).rows(np.zeros((12, 4)), 5, Layout(FOUR, "dp"), 0)
