"""Relayouts of parts of sums and their gradients, against NumPy; merges, and what they move."""

import itertools

import numpy as np
import pytest

from ndtp import Grid, Layout, LayoutError
from ndtp.algebra.relayouts import MergePlan, RelayoutPlan
from ndtp.algebra.steps import Step

GRID = Grid(z=2, x=2, y=3)
SHAPE = (12, 12)


def run(plan, shards):
    """The shards of all ranks after the steps of a plan: a simulation by dense blocks."""
    grid = plan.grid
    for step in plan.steps:
        before = shards
        shards = []
        for rank in range(grid.num_ranks):
            group = grid.group(rank, step.axes)
            me, count = group.index(rank), len(group)
            parts = [before[peer] for peer in group]
            if step.kind == "slice":
                shards.append(np.split(before[rank], count, step.dim)[me])
            elif step.kind == "all_gather":
                shards.append(np.concatenate(parts, step.dim))
            elif step.kind == "all_reduce":
                shards.append(sum(parts))
            elif step.kind == "reduce_scatter":
                shards.append(np.split(sum(parts), count, step.dim)[me])
            else:
                shards.append(np.concatenate([np.split(p, count, step.dim)[me] for p in parts], step.source))
    return shards


LAYOUTS = ("None None", "z None", "None x", "(z y) x", "(z x) y", "None (x y)")


def plans():
    for source, target in itertools.product(LAYOUTS, repeat=2):
        for partial, back in itertools.product(("", "y", "z y", "x y"), ("", "x", "z y")):
            try:
                yield RelayoutPlan(
                    Layout.parse(GRID, source), Layout.parse(GRID, target), tuple(partial.split()), tuple(back.split())
                )
            except LayoutError:
                continue


def test_the_way_back_is_the_transpose_of_the_way_there():
    """With every plan as one linear map of all ranks' shards: <y, A x> = <A' y, x>, each rank's use counted once."""
    rng, count = np.random.default_rng(0), 0
    for plan in plans():
        count += 1
        grid = plan.grid
        dense = rng.integers(-3, 4, SHAPE)
        # Parts of a sum differ from rank to rank along the axes of the sum, and nowhere else.
        parts = {}
        for rank in range(grid.num_ranks):
            at = tuple(grid.coordinate(rank)[axis] for axis in plan.partial)
            parts.setdefault(at, rng.integers(-3, 4, SHAPE))
        whole = sum(parts.values()) if plan.partial else (parts := {(): dense})[()]
        at = [tuple(grid.coordinate(rank)[axis] for axis in plan.partial) for rank in range(grid.num_ranks)]
        there = run(plan, [plan.source.shard(parts[at[rank]], rank) for rank in range(grid.num_ranks)])
        for rank, shard in enumerate(there):
            assert (shard == plan.target.shard(whole, rank)).all(), plan
        assert plan.back.back == plan
    assert count > 100


def test_volume_counts_both_ways():
    plan = RelayoutPlan(Layout(GRID, ("z",), None), Layout(GRID, ("z", "y"), None), ("y",), ("x",))
    assert plan.steps == (Step("reduce_scatter", ("y",), 0),)
    assert plan.back.steps == (Step("all_reduce", ("x",)), Step("all_gather", ("y",), 0))
    volume = plan.volume((12, 5), 1)  # of a byte each
    assert volume.by("phase") == {"forward": 6 * 5 // 3 * 2, "dgrad": 2 * 5 + 6 * 5 // 3 * 2}
    assert plan.volume((12, 5), 1, dgrad=False).total == volume.forward
    same = Layout(GRID, ("z",), None)
    assert RelayoutPlan(same, same).is_identity and not RelayoutPlan(same, same, ("y",)).is_identity


def test_what_is_refused():
    rows, whole = Layout(GRID, "z", None), Layout(GRID, None, None)
    for source, target, partial, back, word in (
        (rows, whole, ("z",), (), "a part of a sum is whole"),
        (whole, rows, (), ("z",), "grad_partial"),
        (whole, whole, ("t",), (), "no axis 't'"),
        (Layout(GRID, ("z", "y"), None), Layout(GRID, "y", None), (), (), "not its minor one"),
        (rows, Layout(Grid(z=4), "z", None), (), (), "on one grid"),
    ):
        with pytest.raises(LayoutError, match=word):
            RelayoutPlan(source, target, partial, back, "n")


def test_a_merge_moves_what_an_all_reduce_would():
    for axes, given, kept in itertools.product((("x",), ("y",), ("y", "x"), ("z", "x", "y")), (1, 2, 3), (1, 2)):
        plan = MergePlan(GRID, axes, given, kept)
        ranks, rows = GRID.size(axes), 24
        expected = given * rows if ranks == 2 else (given + kept) * rows // ranks * (ranks - 1)
        assert plan.volume(rows).elements == expected
        assert plan.axes == tuple(axis for axis in GRID if axis in axes)
    assert MergePlan(GRID, ("y",), 2, 2).volume(7) == MergePlan(GRID, ("y",), 2, 2).volume(9)
    assert not MergePlan(Grid(x=1), ("x",), 2, 2).volume(8).total
