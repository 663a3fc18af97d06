"""The number of chunks is measured for by all ranks together, and everybody is told why."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from ndtp_kernels.choice.chips import CHIPS
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, Layout, LayoutError, MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.collectives.backends import FAKE
from ndtp.collectives.processors import shared_processors
from ndtp.collectives.recorder import Recorder
from ndtp.compute.devices import KINDS, kind_of
from ndtp.planner.hardware import Hardware, Link
from ndtp.planner.speeds import speeds_of
from ndtp.runtime import chunk_count
from ndtp.runtime.chain import asked_of
from ndtp.runtime.chunk_choices import MOST, ChunkChoices, in_words
from ndtp.runtime.chunk_count import issued_as_now
from ndtp.runtime.late_gradients import LateGradients
from ndtp.runtime.region import KeyTape, Region
from ndtp.runtime.step_state import StepState
from ndtp.schedule.chunk_choice import SMALL, Speeds
from ndtp.schedule.host import EAGER
from ndtp.testing import assert_equal, small_integers

pytestmark = pytest.mark.cpu

CUBE = Grid(z=2, x=2, y=2)


def plans_in(chunks):
    return block_layouts(CUBE, "3d").plans("block", chunks=chunks)


def test_a_number_or_auto():
    with pytest.raises(LayoutError, match="chunks='many' is neither a number"):
        plans_in("many")
    assert [asked_of(plans_in(chunks)) for chunks in ("auto", 0, 3)] == [None, 1, 3]
    up, down = plans_in("auto")
    in_two = MatMulPlan(Layout(CUBE, *up.a.dims, chunks=(0, 2)), up.b, up.out, transpose_b=True, chunks="auto")
    assert asked_of((in_two, down)) == 2, "a layout that asks is asked for"
    assert asked_of((plans_in(1)[0], down)) is None


@contextmanager
def measuring_everything():
    """As on machines with processors to spare, whatever the sizes, with small probes; gives the calls of `measure`."""
    cpu = replace(KINDS["cpu"], chunks_from=(0, 0), probe_bytes=2**12, probe_side=32, probe_gathers=1)
    with (
        mock.patch.dict(KINDS, cpu=cpu),
        mock.patch.object(chunk_count, "shared_processors", return_value=0),
        mock.patch.object(chunk_count, "measure", wraps=chunk_count.measure) as measured,
    ):
        yield measured


@contextmanager
def log_lines():
    lines, logger = [], logging.getLogger("ndtp")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def block_on(mesh, seed=0):
    return ndtp.nn.MLP(16, 32, "relu", bias=False, mesh=mesh, scheme="3d", seed=seed)


def chosen_on_ranks(folder):
    grid = Grid(z=2, x=1, y=2)
    mesh, kept, again, small = (ndtp.ProcessGrid(grid) for _ in range(4))
    blocks = [block_on(mesh), block_on(mesh, 1)]
    whole = ndtp.nn.MLP(16, 32, "relu", bias=False, mesh=mesh, scheme="3d", seed=0, chunks=1)
    x = small_integers((64, 16), 3, low=-1, high=1)
    x = blocks[0].in_layout.shard(x, mesh.rank)
    with torch.no_grad():
        for each in (*blocks, whole):
            for p in each.parameters():
                p.copy_(torch.ones_like(p))
    volumes = []
    with measuring_everything() as measured, log_lines() as lines:
        for each in (whole, blocks[0]):
            with CommMeter() as meter, Recorder(mesh) as recorder:
                results = [each(x) for _ in range(2)]
            volumes.append(meter.volume)
            assert all("speeds" not in span.name for span in recorder.spans())
        assert_equal(results[0], whole(x), "auto")
        with torch.no_grad():
            blocks[1](x)
        refined = mesh.refine(y=(2, 1))
        plan = MatMulPlan(Layout.parse(refined.grid, "(z y1) x"), Layout.parse(refined.grid, "(x z) y1"), chunks="auto")
        ndtp.matmul(torch.ones(16, 16), torch.ones(8, 16), plan, refined)
    assert [call.kwargs["known"] is None for call in measured.call_args_list] == [True, False], (
        "links are measured once"
    )
    speeds, part = mesh.step.chunks.measured.values()
    assert speeds.links.items() < part.links.items() and speeds.contention == part.contention
    assert volumes[0] == volumes[1], "measuring is not a part of what is counted"
    (count, why), (_, down) = (mesh.chunks_chosen(layer.plan)[64] for layer in (blocks[0].up, blocks[0].down))
    assert why == down and mesh.chunks_chosen(blocks[1].up.plan) == {64: (count, why)}
    assert f" of 64 rows: {why}" in str(blocks[1].up)
    assert len(lines) == 4 * (mesh.rank == 0), lines  # measuring, and a choice: of a block, and of a product
    assert not mesh.collectives.in_flight

    ndtp.checkpoint.save(blocks[0], None, folder, chunks=True)
    other = block_on(kept)
    ndtp.checkpoint.load(other, None, folder)
    with measuring_everything() as measured:
        other(x)
        other(x[:8])
        assert not measured.called and kept.chunks_chosen(other.up.plan)[64] == (count, why)
        assert other.memory(64) == ndtp.nn.MLP(16, 32, "relu", bias=False, mesh=kept, chunks=count).memory(64)

    free = Hardware("free calls", 4, Link(1e-6, 0, 0), Link(1), {"float32": 1e-7}, launch_us=0)
    ndtp.use_profile(again, free)
    third = block_on(again)
    third(x)
    assert "in one chunk" in str(third.up), "small, but nothing need be measured"

    with measuring_everything() as measured:
        with mock.patch.object(small.collectives.groups, "kind", FAKE):
            block_on(small)(x)
        assert not measured.called
    shared = shared_processors(mesh.groups)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert shared == processors * (mesh.grid.num_ranks * torch.get_num_threads() >= processors)
    return count, speeds


def test_every_rank_chooses_alike_from_what_all_measured(ranks, tmp_path):
    chosen = ranks(4).run(chosen_on_ranks, tmp_path / "run")
    assert all(each == chosen[0] for each in chosen)


def test_what_is_not_worth_a_measurement():
    """Told from plans and sizes alone, before any collective."""
    plans, sizes = plans_in("auto"), [{"m": 4096, "k": 512, "n": 2048}, {"m": 4096, "k": 2048, "n": 512}]
    mesh = Mock(step=StepState(LateGradients()), grid=CUBE, rank=0, wire=None)

    def told():
        return chunk_count.ahead(plans, sizes, mesh, torch.float32, "cpu")

    assert told() is None
    with mock.patch.object(mesh.collectives.groups, "kind", FAKE):
        assert told() == (1, "a fake process group sends nothing")
    torch.use_deterministic_algorithms(True)
    try:
        assert told()[1].startswith("deterministic")
        mesh.step.chunks.profile = lambda grid, dtype: speeds_of(Hardware.load("cpu"), grid, dtype)
        assert "does not pay: " in told()[1], "a profile says the same in every run"
    finally:
        torch.use_deterministic_algorithms(False)
        mesh.step.chunks.profile = None
    mesh.step.chunks.crowd = 2
    assert told() == (1, "the ranks share 2 processors: overlap takes from products what it hides")
    sizes[0]["m"] = sizes[1]["m"] = 32
    assert told() == (1, SMALL)
    meta = torch.device("meta")
    assert chunk_count.resolve(plans, sizes, mesh, torch.float32, meta) == 1 and not mesh.step.chunks.of_plan(plans[0])


def check_measured_whatever_the_rows():
    """Rows that cannot be cut need no measurement; the ranks of `dp` that have others do, and would wait."""
    mesh = mesh_of(Grid(dp=2, z=2))
    with measuring_everything() as measured:
        block = ndtp.nn.MLP(16, 32, mesh=mesh, scheme="3d")
        block(torch.randn((8, 7)[mesh.coordinate["dp"]], 16)).sum().backward()
        assert measured.call_count == 1


def test_ranks_of_dp_measure_together_whatever_their_rows(ranks):
    ranks(4).run(check_measured_whatever_the_rows)


def test_only_so_many_numbers_of_rows_are_remembered():
    choices, (plan, _) = ChunkChoices(), plans_in("auto")
    for rows in range(2 * MOST):
        choices.add(f"{rows} rows", True, (plan,), rows, (2, "why"))
    assert len(choices.of_plan(plan)) == len(choices.to_json()["made"]) == MOST
    last = "; ".join(f"2 chunks of {rows} rows: why" for rows in (2 * MOST - 2, 2 * MOST - 1))
    assert in_words(choices.of_plan(plan)) == f"{last}; and {MOST - 2} other numbers of rows"
    assert choices.by_name() == {"block.up": in_words(choices.of_plan(plan))}


def test_a_gpu_is_probed_with_megabytes_and_multiplies_its_own_part_where_that_takes_microseconds():
    """Not measured: by the rates of an H200, of which these figures are to be far from the fixed costs."""
    kind, chip, link = kind_of("cuda"), CHIPS["h200"], Hardware.load("h200-ib").intra
    assert kind is KINDS["cuda"] and kind_of("cpu") is kind_of("meta") is KINDS["cpu"]
    moving = kind.probe_bytes * link.seconds_per_byte("all_gather", 2)
    assert moving > 5 * link.latency_us * 1e-6, "else bandwidth cannot be told from latency"
    assert 5e-6 < 2 * kind.own_part_from / chip.flops["bfloat16"] < 5e-5


def test_a_grid_of_one_rank_has_nothing_to_hide():
    block = ndtp.nn.MLP(8, 16, mesh=mesh_of(Grid(x=1, y=1, z=1)))
    block(torch.randn(4, 8)).sum().backward()
    assert block.mesh.chunks_chosen(block.up.plan) == {4: (1, "nothing is communicated")}
    assert "chunk" not in str(block.up), "only what speeds decided is worth a line"


def test_the_host_counts_where_it_issues_each_task_and_not_in_a_graph():
    """Behind streams alone; a rehearsal of a captured step chooses as its replays run."""
    speeds = Speeds({}, host=EAGER)
    by_streams, by_host = (
        SimpleNamespace(collectives=SimpleNamespace(orders_by_stream=each, groups=SimpleNamespace(device_type="cpu")))
        for each in (True, False)
    )
    assert issued_as_now(speeds, by_streams) is speeds
    with Region(KeyTape()).entered():
        assert issued_as_now(speeds, by_streams).host is None
        assert issued_as_now(speeds, by_host) is speeds
    assert issued_as_now(speeds, by_streams) is speeds
