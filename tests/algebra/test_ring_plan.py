"""Turns of a ring: every pair of a query and a key once, and as many on each rank in each turn."""

import pytest

from ndtp import Grid
from ndtp.algebra.ring_plan import RingPlan


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [61, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_all_pairs_are_seen_once(ranks, length, is_causal):
    plan = RingPlan(Grid(x=ranks), ("x",), length, -(-length // ranks), is_causal)
    seen = set()
    for index in range(ranks):
        mine = [place for span in plan.positions(index) for place in span]
        for turn in range(ranks):
            theirs = [place for span in plan.positions(plan.source(index, turn)) for place in span]
            for piece in plan.pieces(index, turn):
                for i, query in enumerate(mine[piece.queries]):
                    for j, key in enumerate(theirs[piece.keys]):
                        if not piece.is_causal or j <= i:
                            assert (query, key) not in seen
                            seen.add((query, key))
    assert seen == {(i, j) for i in range(length) for j in range(length) if not is_causal or j <= i}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_causal_work_is_equal_in_every_turn(ranks):
    """In the order of the sequence the last rank would have nearly all of it."""
    plan = RingPlan(Grid(x=ranks), ("x",), 128 * ranks, 128, True)
    turns = list(zip(*(plan.work(index) for index in range(ranks)), strict=True))
    for work in turns:
        assert max(work) <= 1.02 * min(work)
    assert sum(map(sum, turns)) == plan.length * (plan.length + 1) // 2
