"""How many chunks pay, by constants that are given."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest

from ndtp import Grid
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.wire import Wire
from ndtp.schedule import chunk_choice
from ndtp.schedule.chunk_choice import COUNTS, LinkSpeed, Speeds, choose, is_small, messages_of, products_of, seconds_of
from ndtp.schedule.clocks import TimedProduct, Timeline, replayed
from ndtp.schedule.host import EAGER

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
ROWS, HIDDEN, INNER = 4096, 512, 2048
CUBE = Grid(z=2, x=2, y=2)


def chain(grid=CUBE, rows=ROWS):
    plans = block_layouts(grid, "3d").plans("block", chunks="auto")
    return plans, [{"m": rows, "k": HIDDEN, "n": INNER}, {"m": rows, "k": INNER, "n": HIDDEN}]


def speeds(gigabytes=0.1, latency=1e-4, gigaflops=20.0, launch=1e-5, contention=0.0, gap=None):
    return Speeds(alike(LinkSpeed(latency, 1e-9 / gigabytes, gap)), 1e-9 / gigaflops, launch, contention)


def alike(link, axes="zxy"):
    """The same for every collective over every axis."""
    return {(kind, axis): link for kind in KINDS for axis in axes}


def test_chunks_where_there_is_something_to_hide_and_something_to_hide_it_behind():
    count, why = choose(*chain(), 4, speeds())
    assert count > 1 and "in one chunk" in why


@pytest.mark.parametrize(
    "change", [{"contention": 1.0}, {"latency": 0.1}, {"launch": 0.1}, {"gigabytes": 1e5}], ids=str
)
def test_one_chunk_where_overlap_cannot_pay(change):
    count, why = choose(*chain(), 4, speeds(**change))
    assert count == 1 and "does not pay" in why


def test_more_chunks_where_calls_are_cheaper():
    counts = [choose(*chain(), 4, speeds(latency=latency))[0] for latency in (1e-2, 1e-3, 1e-5)]
    assert counts == sorted(counts) and counts[0] < counts[-1]


@pytest.mark.parametrize("predicted, best", [({4: 0.8, 8: 0.797}, 4), ({4: 0.8, 8: 0.79}, 8), ({4: 0.975, 8: 0.98}, 1)])
def test_the_fewest_chunks_of_those_that_are_as_good(predicted, best):
    with mock.patch.object(chunk_choice, "seconds_of", lambda *given, wire: {1: 1.0, **predicted}.get(given[-1], 2.0)):
        assert choose(*chain(), 4, speeds())[0] == best


def test_the_clock_knows_the_bytes_of_a_wire_and_the_time_of_its_codecs():
    wire, slow = Wire.of("fp8"), replace(speeds(), coding={"fp8_e4m3": (1e-6, 1e-6), "fp8_e5m2": (1e-6, 1e-6)})
    plain, few = (seconds_of(*chain(), 4, speeds(gigaflops=2000), 1, wire=each) for each in (None, wire))
    assert few < 0.35 * plain, "a step is as long as its bytes"
    assert seconds_of(*chain(), 4, slow, 1, wire=wire) > 2 * plain, "but for codecs that take longer"
    assert seconds_of(*chain(), 4, slow, 1) == seconds_of(*chain(), 4, speeds(), 1), "which nobody uses without a wire"
    assert Speeds.from_json(json.loads(json.dumps(slow.to_json()))) == slow
    plans, sizes = chain()
    told = sum(plan.volume((s["m"], s["k"], s["n"]), 4, wire).total for plan, s in zip(plans, sizes, strict=True))
    small = [is_small(plans, sizes, 4, (0, told + d), wire) for d in (0, 1)]
    assert small == [False, True]


def test_what_cannot_be_cut_or_is_not_sent():
    assert choose(*chain(rows=4), 4, speeds()) == (1, "its rows cannot be cut for all ranks alike")
    assert choose(*chain(Grid(z=1, x=1, y=1)), 4, speeds()) == (1, "nothing is communicated")


def test_what_is_small():
    """By products and by bytes, on each rank; exactly at the least it is not."""
    plans, sizes = chain()
    products = 2 * ROWS * HIDDEN * INNER // 8
    volumes = [plan.volume((size["m"], size["k"], size["n"])) for plan, size in zip(plans, sizes, strict=True)]
    moved = sum(volume.total for volume in volumes)
    small = {least: is_small(plans, sizes, 4, least) for d in (0, 1) for least in ((products + d, 0), (0, moved + d))}
    assert list(small.values()) == [False, False, True, True]


def test_a_latency_that_goes_by_beside_other_bytes_costs_nothing_but_at_the_ends():
    one, many = (seconds_of(*chain(), 4, speeds(latency=1e-2, gap=0.0), n) for n in (1, 8))
    serial = seconds_of(*chain(), 4, speeds(latency=1e-2), 8)
    free = seconds_of(*chain(), 4, speeds(latency=0.0), 8)
    assert free < many < serial and many - free < (serial - free) / 2
    assert choose(*chain(), 4, speeds(latency=1e-2, gap=0.0))[0] > choose(*chain(), 4, speeds(latency=1e-2))[0]
    assert many < one


def test_sums_are_work_of_the_rank_beside_the_next_bytes():
    """Two chunks of 0.1 s of products and 50 bytes in 0.5 s; a byte keeps the rank busy for 5 ms, and the link not."""
    product = TimedProduct({("forward", "C"): [("reduce_scatter", ("y",), 100)]}, 0.2, 0.1, 0.0)
    for sums, forward in ((0.0, 0.1 + 2 * 0.5), (5e-3, 0.1 + 2 * 0.5 + 0.25)):
        speeds = Speeds({("reduce_scatter", "y"): LinkSpeed(0.0, 0.01, sum_per_byte=sums)})
        spans = []
        assert replayed([product], speeds, 2, spans=spans).forward == pytest.approx(forward)
        assert [each.lane for each in spans if each.what == "sum"] == ["compute"] * 2 * (sums > 0)


def test_a_rank_that_starts_a_call_multiplies_nothing_meanwhile():
    """Two chunks of a second each, and 50 bytes in 0.5 s behind each; a tenth of a second to start that."""
    product = TimedProduct({("forward", "C"): [("reduce_scatter", ("y",), 100)]}, 2.0, 1.0, 0.0)
    for overhead, forward in ((0.0, 2.5), (0.1, 2.6)):
        speeds = Speeds({("reduce_scatter", "y"): LinkSpeed(0.0, 0.01, overhead=overhead)})
        spans = []
        assert replayed([product], speeds, 2, spans=spans).forward == pytest.approx(forward)
        assert [each.lane for each in spans if each.what == "start"] == ["compute"] * 2 * (overhead > 0)
    assert choose(*chain(), 4, speeds_that_cost(1e-2))[0] < choose(*chain(), 4, speeds_that_cost(0.0))[0]


def speeds_that_cost(overhead):
    return Speeds(alike(LinkSpeed(1e-4, 1e-8, overhead=overhead)), 1e-9 / 20.0, 1e-5)


def test_collectives_that_share_a_link_let_it_go_earlier():
    """Of two gathers of 50 bytes, each 0.5 s alone, the second one is there after 0.9 s."""
    product = TimedProduct({("forward", "A"): [("all_gather", ("y",), 100)]}, 0.0, 0.0, 0.0)
    speeds = Speeds({("all_gather", "y"): LinkSpeed(0.0, 0.01, gap_per_byte=8e-3)})
    assert replayed([product], speeds, 2).forward == pytest.approx(0.5 * 0.8 + 0.5)


def test_speeds_are_kept_as_json():
    assert Speeds.from_json(json.loads(json.dumps(speeds_that_cost(0.5).to_json()))) == speeds_that_cost(0.5)
    kept = speeds(contention=0.25, gap=3e-5)
    assert Speeds.from_json(json.loads(json.dumps(kept.to_json()))) == kept
    earlier = kept.to_json()
    earlier["links"] = {key: link[:2] for key, link in earlier["links"].items()}  # of a file without gaps
    assert Speeds.from_json(earlier) == speeds(contention=0.25)


@pytest.mark.parametrize("regather", [(), ("a", "b")], ids=str)
def test_a_step_without_products_lasts_as_long_as_its_bytes(regather):
    """One queue, no latency, a second a byte: what is timed is what the plans predict, and every byte of it."""
    _, sizes = chain()
    plans = block_layouts(CUBE, "3d").plans("block", regather=regather)
    a_second_a_byte = Speeds(alike(LinkSpeed(0.0, 1.0)))
    volumes = [plan.volume((size["m"], size["k"], size["n"])) for plan, size in zip(plans, sizes, strict=True)]
    predicted = sum(volume.total for volume in volumes)
    assert seconds_of(plans, sizes, 4, a_second_a_byte, 1) == pytest.approx(predicted)


@pytest.mark.parametrize(
    "grid, scheme, aims",
    [
        (Grid(x=8), "1d-sp", (1.06, 1.03)),
        (Grid(x=2, y=4), "2d", (1.09, 1.05)),
        (Grid(z=4, y=2), "3d", (1.09, 1.06)),  # alone, the first weight comes behind nothing
        (CUBE, "3d", (1.12, 1.12)),
        (Grid(dp=2, z=2, y=2), "3d", (1.37, 1.23)),  # sums over dp go whole, nothing is behind the last one
    ],
    ids=str,
)
def test_steps_come_close_to_what_no_schedule_beats(grid, scheme, aims):
    """Behind 200 Mbit/s and a millisecond a call, products as long as communication: phase by phase the longer one."""
    plans, sizes = block_layouts(grid, scheme).plans("block"), chain()[1]
    bare = Speeds(alike(LinkSpeed(0.0, 1 / 25e6), grid.names))
    moved = {"forward": 0.0, "backward": 0.0}
    for plan, size in zip(plans, sizes, strict=True):
        for (phase, _), messages in messages_of(plan, size, 4).items():
            moved["forward" if phase == "forward" else "backward"] += sum(bare.seconds(*each) for each in messages)
    flops = 2 * 2 * ROWS * HIDDEN * INNER / grid.num_ranks
    gemm = sum(moved.values()) / (3 + 4 * 0.05)  # of forward; an activation takes a twentieth of it, and thrice that
    after = 0.05 * gemm
    speeds = Speeds(alike(LinkSpeed(1e-3, 1 / 25e6), grid.names), gemm / flops)
    bound = max(moved["forward"], gemm + after) + max(moved["backward"], 2 * gemm + 3 * after)
    for blocks, aim in zip((1, 4), aims, strict=True):
        found = [
            replayed(products_of(plans, sizes, 4, speeds, count, after) * blocks, speeds, count).now / blocks / bound
            for count in COUNTS
        ]
        assert 1 <= min(found) <= aim, f"{blocks} blocks in {COUNTS} chunks: {found}"


def test_a_host_that_issues_each_task_wants_fewer_chunks_and_a_graph_does_not():
    """Small blocks on fast links: more chunks hide more on the device, and cost the host more than they hide."""
    fast = speeds(gigabytes=50, latency=1e-6, gigaflops=2e5, launch=1e-6)
    eager = replace(fast, host=EAGER)
    captured, hosted = choose(*chain(), 2, fast)[0], choose(*chain(), 2, eager)[0]
    assert hosted == 1 <= captured
    alone = [float(replayed(products_of(*chain(), 2, fast, n), fast, n, host=EAGER).issued) for n in (1, 4)]
    times = [seconds_of(*chain(), 2, eager, n) for n in (1, 4)]
    assert times == pytest.approx(alone), "the step is as long as the host needs"
    assert all(seconds_of(*chain(), 2, fast, n) < t for n, t in zip((1, 4), times, strict=True))
    slow = speeds(gigabytes=0.01)  # where the device is the slower one the host is ahead of it, and costs nothing
    assert seconds_of(*chain(), 4, replace(slow, host=EAGER), 4) == pytest.approx(
        seconds_of(*chain(), 4, slow, 4), rel=0.02
    )
    assert Speeds.from_json(json.loads(json.dumps(eager.to_json()))) == eager


def test_links_to_other_nodes_are_other_links_than_those_inside():
    """Two collectives at once share a link if both stay inside of the node, and do not if one leaves it."""

    def both(across):
        line = Timeline(replace(speeds(latency=0.0), across=frozenset(across)))
        for tensor, axis in (("A", "x"), ("B", "y")):
            line.start(("forward", 0, tensor, 0), [("all_gather", (axis,), 1e6)])
        for tensor in ("A", "B"):
            line.wait(("forward", 0, tensor, 0))
        return float(line.now)

    assert both("") == both("xy") == pytest.approx(2 * both("y"))
