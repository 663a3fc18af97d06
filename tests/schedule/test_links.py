"""A link that collectives share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndtp.schedule.chunk_choice import LinkSpeed, Speeds
from ndtp.schedule.clocks import Timeline
from ndtp.schedule.links import SharedLink


def times_of(*sendings):
    """From when to when each is under way: (now, axes, seconds, occupied)."""
    link, sent = SharedLink(), []
    for sending in sendings:
        sent.append(SimpleNamespace(begin=None, end=None))
        link.send(sent[-1], *sending)
    return [(each.begin, pytest.approx(each.end)) for each in sent]


def test_collectives_over_the_same_axes_go_one_after_another():
    assert times_of((1.0, "x", 2.0, 1.5), (2.0, "x", 2.0, 1.5)) == [(1.0, 3.0), (2.5, 4.5)]


def test_over_other_axes_they_share_it():
    assert times_of((0.0, "x", 2.0, 2.0), (0.0, "y", 1.0, 1.0)) == [(0.0, 3.0), (0.0, 2.0)]
    assert times_of((0.0, "x", 2.0, 2.0), (1.0, "y", 2.0, 2.0)) == [(0.0, 3.0), (1.0, 4.0)]
    assert times_of((0.0, "x", 2.0, 2.0), (5.0, "y", 2.0, 2.0)) == [(0.0, 2.0), (5.0, 7.0)]
    three = times_of((0.0, "x", 1.0, 1.0), (0.0, "y", 1.0, 1.0), (0.0, "y", 1.0, 1.0))
    assert three == [(0.0, 2.0), (0.0, 2.0), (2.0, 3.0)]


def test_what_was_told_changes_with_what_follows():
    link, gather, scatter = SharedLink(), *(SimpleNamespace(begin=None, end=None) for _ in range(2))
    link.send(gather, 0.0, "x", 2.0, 2.0)
    assert gather.end == 2.0
    link.send(scatter, 1.0, "y", 0.5, 0.5)
    assert (gather.end, scatter.end) == (2.5, 2.0)


@given(st.lists(st.tuples(st.floats(0, 3), st.sampled_from("xyz"), st.floats(1e-3, 2)), min_size=1, max_size=12))
def test_a_link_works_while_anything_is_under_way(sendings):
    """Whatever the axes, all are there when they would be one after the other, and none before its own seconds."""
    now = free = 0.0
    link, sent = SharedLink(), []
    for pause, axes, seconds in sendings:
        now += pause
        sent.append((SimpleNamespace(begin=None, end=None), now, seconds))
        link.send(sent[-1][0], now, axes, seconds, seconds)
        free = max(free, now) + seconds
        assert max(each.end for each, *_ in sent) == pytest.approx(free)
    for each, begin, seconds in sent:
        assert begin <= each.begin and each.begin + seconds <= each.end + 1e-9


def test_a_wait_lasts_longer_by_what_was_sent_beside_it():
    """Of two gathers over other axes the first one is there when the link has moved both."""
    speeds = Speeds({("all_gather", axis): LinkSpeed(0.0, 0.01) for axis in "xy"})
    spans = []
    line = Timeline(speeds, spans=spans)
    first, second = (("forward", 0, tensor, None) for tensor in "AB")
    line.start(first, [("all_gather", ("x",), 100)])
    line.start(second, [("all_gather", ("y",), 100)])
    line.wait(first)
    assert line.now == pytest.approx(2.0)
    line.wait(second)
    assert line.now == pytest.approx(2.0)
    assert [(each.lane, each.begin, pytest.approx(each.end)) for each in spans] == [(("x",), 0, 2.0), (("y",), 0, 2.0)]
