"""`auto` chooses as well as what programs have issued would have it, by a clock that knows nothing of its tasks."""

import pytest
from every_choice import LARGE, Block, choices

from ndtp import Grid
from ndtp.testing import RecordedClock
from ndtp.testing.cuda.multiprocessors import Operation


@pytest.mark.parametrize(
    "block",
    [
        Block("3d", Grid(z=2, x=2, y=2), (8192, 4096, 16384)),
        Block("3d", Grid(z=4, x=2, y=2), (32768, 4096, 16384)),
        Block("3d", LARGE, (32768, 8192, 32768)),  # two collectives that share a link evenly are both done late
        Block("3d", LARGE, (32768, 4096, 16384)),
        Block("3d", Grid(z=2, x=4, y=8), (32768, 8192, 32768)),
        Block("2d", Grid(x=4, y=4), (32768, 8192, 32768)),
        Block("2d", Grid(x=8, y=8), (65536, 8192, 32768)),
        Block("1d-sp", Grid(x=8), (32768, 4096, 16384)),
    ],
    ids=str,
)
def test_the_choice_of_auto_is_within_a_twentieth_of_the_best(block):
    chosen = set()
    for each in choices(block):
        assert each.above_best <= 1.05, each
        for count, seconds in each.times.items():  # and it knows how long each number takes
            assert each.predicted[count] == pytest.approx(seconds, rel=0.15), each
        chosen.add(each.chosen)
    assert len(chosen) > 1 or block.sizes[0] == 8192 or block.grid.num_ranks == 64, "the choice depends on something"


def test_the_clock_by_hand():
    """Two kernels with a collective beside the second; a host that is slower than both; one that is ahead."""
    operations = [
        Operation(1, 1, "a", {}), Operation(2, 1, "gather", {1: 1}, (0, 1)), Operation(1, 2, "b", {1: 1}),
        Operation(1, 3, "c", {1: 2, 2: 1}),
    ]  # fmt: skip
    device = {"a": 1.0, "gather": 3.0, "b": 2.0, "c": 1.0}
    assert RecordedClock(lambda each: device[each.name]).step(operations) == 5.0
    assert RecordedClock(lambda each: device[each.name], contention=0.5).step(operations) == 5.5
    assert RecordedClock(lambda each: device[each.name], lambda each: 2.0).step(operations) == 8.0
    assert RecordedClock(lambda each: device[each.name], lambda each: 0.5).step(operations) == 5.0
