"""Who sends what to whom: every pair of layouts of the grids of eight ranks, uneven sizes too, and the least bytes.

So between grids of other ranks, as many or not: no rank in common, all of them, or some.
"""

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

SMALL = [Grid(x=1), Grid(x=2), Grid(y=3), Grid(x=2, z=2), Grid(y=2, x=3), Grid(z=2, x=2, y=2)]
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
    sources = plan.ranks or tuple(range(plan.source.grid.num_ranks))
    targets = plan.target_ranks or sources
    ranks = {*sources, *targets}
    origin, nothing = (0,) * len(plan.shape), np.zeros(0, int)
    old = {r: numbers(blocks(plan.source, plan.shape, plan.start or origin, i)) for i, r in enumerate(sources)}
    new = {
        r: numbers(blocks(plan.target, plan.end_shape, plan.target_start or origin, i)) for i, r in enumerate(targets)
    }
    everything = set(np.concatenate([o.ravel() for o in old.values()]))
    has = {rank: set(old.get(rank, nothing).ravel()) for rank in ranks}
    got, sent = {rank: set() for rank in ranks}, Counter()
    messages = [message for rank in ranks for message in plan.sends(rank)]
    assert sorted(messages) == sorted(m for rank in ranks for m in plan.receives(rank)) == sorted(plan.messages)
    assert len({(m.sender, m.receiver) for m in messages}) == len(messages), "one message to a rank at most"
    for message in messages:
        elements = set(indices(plan, message.box).ravel())
        assert elements and elements <= has[message.sender], "sends what it holds"
        assert not elements & (has[message.receiver] | got[message.receiver]), "nobody receives what he has"
        assert elements <= set(new.get(message.receiver, nothing).ravel()), "nor what he does not want"
        got[message.receiver] |= elements
        sent[message.sender] += len(elements)
    for rank in ranks:
        assert got[rank] == (set(new.get(rank, nothing).ravel()) & everything) - has[rank]
        assert plan.received(rank) == len(got[rank]) and plan.sent(rank) == sent[rank]
    assert plan.is_local == (not messages)
    assert plan.busiest == max(map(len, got.values()))
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
    kind = draw(st.sampled_from(["same", "permuted", "others", "others"]))
    grids = GRIDS if kind != "others" else SMALL
    one, other = draw(layouts(ndim, grids)), draw(layouts(ndim, grids))
    sizes = st.lists(st.integers(0, 13), min_size=ndim, max_size=ndim).map(tuple)
    starts = st.lists(st.integers(-4, 4), min_size=ndim, max_size=ndim).map(tuple)
    window = (draw(sizes), draw(starts), draw(starts)) if draw(st.booleans()) else (None, (), ())
    ranks = targets = None
    if kind == "permuted":
        targets = tuple(draw(st.permutations(range(8))))
    elif kind == "others":  # in common: none, some or all
        ranks = tuple(draw(st.permutations(range(8)))[: one.grid.num_ranks])
        base = draw(st.sampled_from([0, 5, 8]))
        targets = tuple(base + each for each in draw(st.permutations(range(8)))[: other.grid.num_ranks])
    return ReshardPlan(one, other, draw(sizes), *window, ranks, targets)


@settings(max_examples=200, deadline=None)
@given(plans())
def test_any_layout_of_any_grid_to_any_other(plan):
    """Uneven, empty and replicated blocks, slices, ranks that sit elsewhere on the other grid, or are not on it."""
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
        replicas = [rank for rank in plan.ids if plan.held(rank) == block]
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
        volume = plan.volume(3, dtype=1)
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
        (lambda: ReshardPlan(Layout(Grid(x=2), "x"), Layout(Grid(x=2), "x"), (8,), ranks=(1, 1)), GridError, "1, 1"),
        (lambda: ReshardPlan(Layout(Grid(x=8), "x"), Layout(Grid(x=8), None, None), (8,)), LayoutError, "of dims"),
        (lambda: ReshardPlan(Layout(Grid(x=8), "x"), Layout(Grid(y=8), "y"), (8, 2)), LayoutError, "of dims"),
    ],
)  # fmt: skip
def test_what_is_refused(make, error, word):
    with pytest.raises(error, match=word):
        make()


def test_padding_stays_where_it_is():
    """Ten rows, padded to twelve and to sixteen: of them alone a rank receives what it lacks."""
    one, other = Grid(x=2, z=2), Grid(y=4)
    for source, target in itertools.product((("x", "z"), ("z", None)), (("y", None), (None, "y"), (None, None))):
        source, target = Layout(one, *source), Layout(other, *target)
        plan = ReshardPlan(source, target, (12, 8), (16, 8), end=(10, 8))
        for rank in range(4):
            has, wants = (np.zeros((16, 8), bool) for _ in range(2))
            has[source.slices(rank, (12, 8))] = True
            wants[target.slices(rank, (16, 8))] = True
            has[10:] = wants[10:] = False
            assert plan.received(rank) == (wants & ~has).sum(), (source, target, rank)
            assert sum(m.elements for m in plan.back.receives(rank)) == (has & ~wants).sum(), (source, target, rank)
        assert all(end <= 10 for message in plan.messages for (_, end), *_ in [message.box])
