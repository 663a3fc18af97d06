"""The tokens below which the host limits an eager step."""

import pytest

import ndtp
from ndtp import Grid, GridError
from ndtp.planner.block_cost import Block
from ndtp.planner.block_schedule import schedule
from ndtp.planner.hardware import Hardware
from ndtp.planner.host_limit import host_limit
from ndtp.planner.request import Request
from ndtp.planner.search import predict

CUBE = Grid(z=2, x=2, y=2)


def test_more_chunks_faster_devices_and_smaller_blocks_want_more_tokens():
    least = host_limit(CUBE, 4096, 16384, "h200-ib")
    assert least < host_limit(CUBE, 4096, 16384, "h200-ib", chunks=4)
    assert least < host_limit(CUBE, 4096, 16384, "b200-ib")
    assert host_limit(CUBE, 8192, 32768, "h200-ib") < least < host_limit(Grid(z=4, x=4, y=4), 4096, 16384, "h200-ib")


def test_an_eager_step_is_as_long_as_its_host_below_and_as_a_captured_one_far_above():
    machine = Hardware.load("h200-ib")
    least = host_limit(CUBE, 4096, 16384, machine)

    def seconds(tokens, captured):
        request = Request((Block.mlp(tokens, 4096, 16384),), 8, machine, captured=captured)
        return float(predict(request, CUBE).total)

    assert seconds(least // 8, False) > 1.3 * seconds(least // 8, True)
    assert seconds(8 * least, False) == pytest.approx(seconds(8 * least, True), rel=0.02)
    best = (
        ndtp.plan(64 * least, 4096, 16384, 8, "h200-ib", limit=1),
        ndtp.plan(64 * least, 4096, 16384, 8, "h200-ib", limit=1, captured=False),
    )
    assert best[0][0].grid == best[1][0].grid


def test_a_schedule_shows_the_host_only_where_no_graph_issues_it():
    lanes = [
        {span.lane for span in schedule(CUBE, (4096, 4096, 16384), Hardware.load("h200-ib"), captured=captured)}
        for captured in (True, False)
    ]
    assert "host" not in lanes[0] and lanes[1] == lanes[0] | {"host"}


def test_where_the_processors_compute_there_is_no_host():
    with pytest.raises(GridError, match="fix: host ="):
        host_limit(CUBE, 4096, 16384, "cpu")
