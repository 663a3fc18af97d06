"""The number of chunks is measured for by all ranks together, and everybody is told why."""

from __future__ import annotations

import logging

import pytest
import torch
from ndtp_kernels.choice.chips import CHIPS
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.algebra.schemes import block_layouts
from ndtp.compute.devices import KINDS, kind_of
from ndtp.compute.gemm import TorchGemm
from ndtp.ops.products import mlp
from ndtp.planner.hardware import Hardware
from ndtp.runtime.chunk_count import measure
from ndtp.testing import assert_equal, small_integers

CUBE = Grid(z=2, x=2, y=2)


def plans_in(chunks):
    return block_layouts(CUBE, "3d").plans("block", chunks=chunks)


def test_a_number_or_auto():
    with pytest.raises(LayoutError, match="chunks='many' is neither a number"):
        plans_in("many")
    assert str(plans_in("auto")[0]).endswith("chunks: auto, chosen where it first runs")


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
            plans = plans_in(chunks)
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


class Watched(TorchGemm):
    """What multiplies, and with what."""

    def __init__(self):
        self.operands = []

    def bound(self, letters, one, other, **how):
        product = super().bound(letters, one, other, **how)

        def run(a, b):
            self.operands.append(a)
            return product(a, b)

        return run


def test_products_are_measured_as_they_are_multiplied():
    """By the grid's own GEMM, of random numbers that nobody misses; and of sizes for the device."""
    mesh, gemm, before = mesh_of(Grid(x=1)), Watched(), torch.get_rng_state()
    speeds = measure(mesh.collectives, gemm, torch.empty(1, dtype=torch.bfloat16))
    assert speeds.per_flop > 0 and speeds.launch > 0
    assert {x.shape[0] for x in gemm.operands} == {16, KINDS["cpu"].probe_side}
    assert all(x.dtype == torch.bfloat16 and x.unique().numel() > 20 for x in gemm.operands)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpu_is_probed_with_megabytes_and_multiplies_its_own_part_where_that_takes_microseconds():
    """Not measured: by the rates of an H200, of which these figures are to be far from the fixed costs."""
    kind, chip, link = kind_of("cuda"), CHIPS["h200"], Hardware.load("h200-ib").intra
    assert kind is KINDS["cuda"] and kind_of("cpu") is kind_of("meta") is KINDS["cpu"]
    moving = kind.probe_bytes * link.seconds_per_byte("all_gather", 2)
    assert moving > 5 * link.latency_us * 1e-6, "else bandwidth cannot be told from latency"
    assert 5e-6 < 2 * kind.own_part_from / chip.flops["bfloat16"] < 5e-5


def test_every_rank_chooses_alike_from_what_all_measured(ranks):
    chosen = ranks(8).run(chosen_on_ranks)
    assert all(each == chosen[0] for each in chosen)


def test_a_grid_of_one_rank_has_nothing_to_hide():
    block = ndtp.nn.MLP(8, 16, mesh=mesh_of(Grid(x=1, y=1, z=1)), chunks="auto")
    block(torch.randn(4, 8)).sum().backward()
    assert block.mesh.chunks_chosen(block.up.plan) == {4: (1, "nothing is communicated")}
    assert "; 1 chunk of 4 rows: nothing is communicated" in str(block.up)
