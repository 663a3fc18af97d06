"""How many chunks pay, and that everybody is told why."""

from __future__ import annotations

import logging

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.algebra.schemes import block_layouts
from ndtp.ops.products import mlp
from ndtp.runtime.chunk_count import KINDS
from ndtp.schedule.chunk_choice import Speeds, choose
from ndtp.testing import assert_equal, small_integers

ROWS, HIDDEN, INNER = 4096, 512, 2048
CUBE = Grid(z=2, x=2, y=2)


def chain(grid=CUBE, rows=ROWS, chunks="auto"):
    plans = block_layouts(grid, "3d").plans("block", chunks=chunks)
    return plans, [{"m": rows, "k": HIDDEN, "n": INNER}, {"m": rows, "k": INNER, "n": HIDDEN}]


def speeds(gigabytes=0.1, latency=1e-4, gigaflops=20.0, launch=1e-5, contention=0.0):
    keys = [(kind, axis) for kind in KINDS for axis in "zxy"]
    return Speeds(
        dict.fromkeys(keys, latency), dict.fromkeys(keys, 1e-9 / gigabytes), 1e-9 / gigaflops, launch, contention
    )


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


def test_what_cannot_be_cut_or_is_not_sent():
    assert choose(*chain(rows=4), 4, speeds()) == (1, "its rows cannot be cut for all ranks alike")
    assert choose(*chain(Grid(z=1, x=1, y=1)), 4, speeds()) == (1, "nothing is communicated")


def test_a_number_or_auto():
    with pytest.raises(LayoutError, match="chunks='many' is neither a number"):
        chain(chunks="many")
    plans, _ = chain()
    assert str(plans[0]).endswith("chunks: auto, chosen where it first runs")


def chosen_on_ranks():
    mesh = ndtp.ProcessGrid(CUBE)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ndtp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        results, volumes = [], []
        for chunks in (1, "auto"):
            plans, _ = chain(chunks=chunks)
            shapes = ((64, 16), (32, 16), (16, 32))
            layouts = (plans[0].a, plans[0].b, plans[1].b)
            whole = [small_integers(shape, i, low=-1, high=1) for i, shape in enumerate(shapes)]
            x, up, down = (layout.shard(t, mesh.rank) for layout, t in zip(layouts, whole, strict=True))
            with CommMeter() as meter:
                results += [mlp(x, (up, down), plans, mesh, "relu") for _ in range(2)]
            volumes.append(meter.volume)
    finally:
        logger.removeHandler(handler)
    for result in results:
        assert_equal(result, results[0], "auto")
    assert volumes[0] == volumes[1], "measuring is not a part of what is counted"
    count, why = mesh.chunks_chosen(plans[0])[64]
    assert mesh.chunks_chosen(plans[1]) == {64: (count, why)} and why
    assert len(lines) == (mesh.rank == 0), lines
    assert not mesh.collectives.in_flight
    return count, mesh.step.speeds


def test_every_rank_chooses_alike_from_what_all_measured(ranks):
    chosen = ranks(8).run(chosen_on_ranks)
    assert all(each == chosen[0] for each in chosen)


def test_a_grid_of_one_rank_has_nothing_to_hide():
    block = ndtp.nn.MLP(8, 16, mesh=mesh_of(Grid(x=1, y=1, z=1)), chunks="auto")
    block(torch.randn(4, 8)).sum().backward()
    assert block.mesh.chunks_chosen(block.up.plan) == {4: (1, "nothing is communicated")}
    assert "; 1 chunk of 4 rows: nothing is communicated" in str(block.up)
