"""Who sends what to whom: every pair of layouts of the grids of eight ranks, uneven sizes too, and the least bytes."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtp import Grid, GridError, Layout, LayoutError
from ndtp.algebra.resharding import ReshardPlan
from ndtp.planner.sequence import relayout_elements

GRIDS = [grid for names in itertools.permutations("zxy") for grid in Grid.all(8, names)]


def indices(plan, box):
    """The numbers of a box's elements, of a frame of 64 a dim that begins at -16."""
    ranges = np.meshgrid(*(np.arange(start, stop) + 16 for start, stop in box), indexing="ij")
    number = np.zeros([stop - start for start, stop in box], int)
    for each in ranges:
        number = number * 64 + each
    return number


def blocks(layout, shape, start, rank):
    """Where a rank's block lies, by DTensor's rule, which cuts axis by axis."""
    position, rest = {}, rank
    for axis, size in reversed(list(zip(layout.grid.names, layout.grid.shape, strict=True))):
        rest, position[axis] = divmod(rest, size)
    box = []
    for axes, size, at in zip(layout.dims, shape, start, strict=True):
        piece = np.arange(at, at + size)
        for axis in axes:
            step = -(-len(piece) // layout.grid[axis])
            piece = piece[position[axis] * step : (position[axis] + 1) * step]
        box.append(piece)
    return box


def numbers(pieces):
    """As `indices`, of explicit coordinates."""
    number = np.zeros([len(piece) for piece in pieces], int)
    for each in np.meshgrid(*(piece + 16 for piece in pieces), indexing="ij"):
        number = number * 64 + each
    return number


def simulate(plan):
    """Every rank's new block out of its old one and its messages; returns what each sent."""
    ranks = range(plan.source.grid.num_ranks)
    origin = (0,) * len(plan.shape)
    old = [numbers(blocks(plan.source, plan.shape, plan.start or origin, rank)) for rank in ranks]
    seats = plan.seats or tuple(ranks)
    new = [numbers(blocks(plan.target, plan.end_shape, plan.target_start or origin, seats[rank])) for rank in ranks]
    everything = set(np.concatenate([o.ravel() for o in old]))
    has = [set(block.ravel()) for block in old]
    got, sent = [set() for _ in ranks], Counter()
    messages = [message for rank in ranks for message in plan.sends(rank)]
    assert sorted(messages) == sorted(m for rank in ranks for m in plan.receives(rank)) == sorted(plan.messages)
    assert len({(m.sender, m.receiver) for m in messages}) == len(messages), "one message to a rank at most"
    for message in messages:
        elements = set(indices(plan, message.box).ravel())
        assert elements and elements <= has[message.sender], "sends what it holds"
        assert not elements & (has[message.receiver] | got[message.receiver]), "nobody receives what he has"
        assert elements <= set(new[message.receiver].ravel()), "nor what he does not want"
        got[message.receiver] |= elements
        sent[message.sender] += len(elements)
    for rank in ranks:
        assert got[rank] == (set(new[rank].ravel()) & everything) - has[rank]
        assert plan.received(rank) == len(got[rank]) and plan.sent(rank) == sent[rank]
    assert plan.is_local == (not messages)
    assert plan.busiest == max(len(each) for each in got)
    return sent


@st.composite
def layouts(draw, ndim, grids):
    grid = draw(st.sampled_from(grids))
    dims = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(grid.names)):
        if (dim := draw(st.integers(-1, ndim - 1))) >= 0:
            dims[dim].append(axis)
    return Layout(grid, *dims)


@st.composite
def plans(draw):
    ndim = draw(st.integers(0, 3))
    one, other = draw(layouts(ndim, GRIDS)), draw(layouts(ndim, GRIDS))
    sizes = st.lists(st.integers(0, 13), min_size=ndim, max_size=ndim).map(tuple)
    starts = st.lists(st.integers(-4, 4), min_size=ndim, max_size=ndim).map(tuple)
    window = (draw(sizes), draw(starts), draw(starts)) if draw(st.booleans()) else (None, (), ())
    seats = tuple(draw(st.permutations(range(8)))) if draw(st.integers(0, 3)) == 0 else None
    return ReshardPlan(one, other, draw(sizes), *window, seats)


@settings(max_examples=200, deadline=None)
@given(plans())
def test_any_layout_of_any_grid_to_any_other(plan):
    """Uneven, empty and replicated blocks, slices, and ranks that sit elsewhere on the other grid."""
    simulate(plan)
    simulate(plan.back)
    assert list(plan.back.back.messages) == list(plan.messages), "every rank says the same"


def least_load(replicas, sizes):
    """Of the busiest sender, over all choices of a sender for every part."""
    choices = itertools.product(range(replicas), repeat=len(sizes))
    return min(max(np.bincount(choice, weights=sizes)) for choice in choices)


@settings(max_examples=100, deadline=None)
@given(plans())
def test_replicas_share_the_sending(plan):
    """Against all choices of senders, where there are few; where parts are equal, none is better."""
    by_block = {}
    for message in plan.messages:
        by_block.setdefault(plan.held(message.sender), []).append(message)
    for block, messages in by_block.items():
        replicas = [rank for rank in range(8) if plan.held(rank) == block]
        sizes = [message.elements for message in messages]
        if len(replicas) ** len(sizes) > 256:
            continue
        found = max(sum(m.elements for m in messages if m.sender == rank) for rank in replicas)
        best = least_load(len(replicas), sizes)
        assert found == best or (len(set(sizes)) > 1 and 3 * len(replicas) * found <= (4 * len(replicas) - 1) * best)


def test_a_neighbour_sends():
    """A tensor that two nodes of two ranks hold whole each, as halves: rows come from the rank next door."""
    one, other = Grid(node=2, x=2), Grid(y=4)
    plan = ReshardPlan(Layout(one, "x", None), Layout(other, None, "y"), (4, 4))
    assert {(m.sender // 2, m.receiver // 2) for m in plan.messages} == {(0, 0), (1, 1)}


def test_counts_what_the_planner_counts():
    layouts = [
        Layout(Grid(z=2, x=2, y=2), ("z", "y"), "x"),
        Layout(Grid(y=4, x=2), "x", "y"),
        Layout(Grid(y=4, x=2), None, None),
        Layout(Grid(x=8), None, "x"),
    ]
    for one, other in itertools.product(layouts, repeat=2):
        plan = ReshardPlan(one, other, (16, 24))
        assert plan.busiest == relayout_elements(one, other, (16, 24))
        volume = plan.volume(3)
        assert volume.forward == plan.received(3) and volume.backward == plan.back.received(3)


def test_a_thousand_ranks():
    one = Layout(Grid(z=16, x=8, y=8), ("z", "y"), "x")
    other = Layout(Grid(x=4, y=256), "x", "y")
    plan = ReshardPlan(one, other, (4096, 4096))
    assert (
        plan.received(1000)
        == sum(m.elements for m in plan.receives(1000))
        == 4096 * 4096 // 1024 - (0 if plan.kept(1000) is None else 1024 * 16)
    )


@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (lambda: ReshardPlan(Layout(Grid(x=8), "x"), Layout(Grid(x=4), "x"), (8,)), GridError, "a grid of as many"),
        (lambda: ReshardPlan(Layout(Grid(x=8), "x"), Layout(Grid(x=8), None, None), (8,)), LayoutError, "of dims"),
        (lambda: ReshardPlan(Layout(Grid(x=8), "x"), Layout(Grid(y=8), "y"), (8, 2)), LayoutError, "of dims"),
    ],
)  # fmt: skip
def test_what_is_refused(make, error, word):
    with pytest.raises(error, match=word):
        make()
