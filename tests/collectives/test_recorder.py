"""Ranges for profilers carry axis, chunk and tensor; the recorder sees every flight from its issue to its end."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import mesh_of
from torch.profiler import ProfilerActivity, profile

from ndtp import CommMeter, CommunicationError, Grid, ProcessGrid
from ndtp.algebra.steps import Step
from ndtp.collectives.recorder import NOTHING, Recorder, span
from ndtp.nn import MLP

GRID = Grid(x=4)
KINDS = [
    (Step("all_gather", ("x",), 1), "all_gather[x]"),
    (Step("reduce_scatter", ("x",), 0), "reduce_scatter[x]"),
    (Step("all_reduce", ("x",)), "all_reduce[x]"),
    (Step("all_to_all", ("x",), 0, 1), "all_to_all[x]"),
]


def every_kind(mesh) -> None:
    for i, (step, _) in enumerate(KINDS):
        mesh.collectives.start(step, torch.ones(4, 6), ("up", "A"), "forward", part=f"{i + 1}/4").wait()


def profiled():
    mesh = mesh_of(GRID)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        every_kind(mesh)
        with span(mesh.step.recording.recorder, "gemm", "C", "2/4", "up"):
            torch.ones(2, 2) @ torch.ones(2, 2)
        with span(mesh.step.recording.recorder, "gelu"):
            pass
    names = [event.name for event in profiler.events() if event.name.startswith("ndtp::")]
    expected = ["ndtp::gemm C 2/4 up", "ndtp::gelu"]
    for i, (_, title) in enumerate(KINDS):
        expected += [f"ndtp::{verb}{title} {i + 1}/4 up A" for verb in ("", "wait ", "finish ")]
    assert sorted(names) == sorted(expected), names
    assert span(None, "gemm") is NOTHING, "the profiler is off"


def test_a_profiler_shows_axis_chunk_and_tensor(ranks):
    ranks(4).run(profiled)


def recorded():
    mesh = mesh_of(GRID)
    with Recorder(mesh) as recorder:
        every_kind(mesh)
        with span(mesh.step.recording.recorder, "gemm", "C", "2/4"):
            time.sleep(0.01)
    assert mesh.step.recording.recorder is None, "left"
    every_kind(mesh)
    spans = recorder.spans()
    flights = [each for each in spans if each.kind == "collective"]
    assert [each.name for each in flights] == [f"{title} {i + 1}/4 up A" for i, (_, title) in enumerate(KINDS)], flights
    assert all(each.axes == ("x",) and each.phase == "forward" for each in flights), flights
    waits = [each for each in spans if each.kind == "wait"]
    for flight, wait in zip(flights, waits, strict=True):
        assert 0 <= flight.start <= flight.end <= wait.end, (flight, wait)
        assert flight.start <= wait.start, (flight, wait)
    (product,) = [each for each in spans if each.name == "gemm C 2/4"]
    assert product.kind == "compute" and product.end - product.start >= 0.01, product
    alone = [each for each in spans if each.kind != "collective"]
    assert all(one.end <= other.start for one, other in pairwise(alone)), alone


def recorded_in_two():
    """An all-reduce that is two collectives flies twice, is waited for twice, and computes only beside its flights."""
    mesh = mesh_of(GRID)
    with Recorder(mesh) as recorder:
        x = torch.ones(6, dtype=torch.bfloat16)
        assert mesh.collectives.start(KINDS[2][0], x, ("up", "dB"), "wgrad").wait().eq(4).all()
    spans = {
        kind: [each for each in recorder.spans() if each.kind == kind] for kind in ("collective", "wait", "compute")
    }
    assert [len(spans[kind]) for kind in ("collective", "wait")] == [2, 2], spans
    for flight in spans["collective"]:
        assert not any(each.start <= flight.start and flight.end <= each.end for each in spans["compute"]), spans


def test_the_recorder_sees_every_flight(ranks):
    ranks(4).run(recorded)
    ranks(4).run(recorded_in_two)


def late_peer():
    """A flight ends when the collective is complete: not before the last peer came, nor at the wait."""
    mesh = mesh_of(GRID)
    dist.barrier()
    with Recorder(mesh) as recorder:
        if mesh.rank == 1:
            time.sleep(0.1)
        here = time.perf_counter()  # one clock for all processes of a machine
        handle = mesh.collectives.start(Step("all_gather", ("x",), 0), torch.ones(4), ("up", "A"), "forward")
        while any(entry.end is None for entry in recorder.entries):
            time.sleep(0.001)
        there = time.perf_counter()
        handle.wait()
    (entry,) = [entry for entry in recorder.entries if entry.kind == "collective"]
    arrivals: list = [None] * 4
    dist.all_gather_object(arrivals, here)
    assert max(arrivals) <= entry.end <= there, (arrivals, entry, there)
    (flight, wait) = [each for each in recorder.spans() if each.kind in ("collective", "wait")]
    assert flight.end <= wait.start, (flight, wait)


def test_a_flight_ends_when_it_is_complete(ranks):
    ranks(4).run(late_peer)


def failed_flight():
    """What goes wrong in the thread that watches a flight is raised where the flight is waited for."""
    mesh = mesh_of(GRID)

    class Lost:
        def wait(self):
            raise RuntimeError("connection reset")

    with Recorder(mesh):
        with (
            mock.patch.object(mesh.collectives, "_gather", lambda *_: Lost()),
            pytest.raises(CommunicationError, match=r"all_gather of up A .forward. over axis x"),
        ):
            mesh.collectives.start(Step("all_gather", ("x",), 0), torch.ones(4), ("up", "A"), "forward").wait()
        every_kind(mesh)
    assert not mesh.collectives.in_flight


def test_a_flight_that_fails_is_raised_at_its_wait(ranks):
    ranks(4).run(failed_flight)


def parts_and_traffic():
    mesh = mesh_of(GRID)
    volumes = []
    for parts in (("", ""), ("1/2", "2/2")):
        with CommMeter() as meter:
            for part in parts:
                mesh.collectives.start(
                    Step("all_gather", ("x",), 0), torch.ones(4), ("up", "A"), "forward", part=part
                ).wait()
        volumes.append(meter.volume)
    assert volumes[0] == volumes[1], volumes


def test_traffic_does_not_tell_chunks_apart(ranks):
    ranks(4).run(parts_and_traffic)


def test_nobody_looks():
    mesh = mesh_of(Grid(x=1))
    assert span(mesh.step.recording.recorder, "gemm", "C", "2/4") is NOTHING


def test_one_recorder_at_a_time():
    mesh = mesh_of(Grid(x=1))
    with Recorder(mesh), pytest.raises(RuntimeError, match="has a recorder already"), Recorder(mesh):
        pass
    assert mesh.step.recording.recorder is None


def profiled_block():
    """Forward and backward of a 3D block in four chunks: every collective and product of the schedule, once a chunk."""
    mesh = mesh_of(Grid(z=2, y=2))
    mlp = MLP(8, 16, "relu", bias=False, mesh=mesh, scheme="3d", chunks=4, seed=0, name="mlp")
    x = torch.ones(mlp.in_layout.shard_shape((64, 8)), requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        mlp(x).sum().backward()
    names = Counter(event.name for event in profiler.events() if event.name.startswith("ndtp::"))
    expected = []
    for i in range(1, 5):
        expected += [
            f"ndtp::gemm {tensor} {i}/4 mlp.{layer}" for tensor in ("C", "dA", "dB") for layer in ("up", "down")
        ]
        expected += [f"ndtp::reduce_scatter[z] {i}/4 mlp.{layer} dB" for layer in ("up", "down")]
        expected += [f"ndtp::all_gather[y] {i}/4 mlp.up A", f"ndtp::reduce_scatter[y] {i}/4 mlp.down C"]
        expected += [f"ndtp::all_gather[y] {i}/4 mlp.down dC", f"ndtp::reduce_scatter[y] {i}/4 mlp.up dA"]
    expected += ["ndtp::gemm own C 1/4 mlp.up", "ndtp::gemm own dA 1/4 mlp.down"]
    expected += [
        f"ndtp::activate {name} {i}/4 mlp.{at}" for name, at in (("A", "down"), ("dC", "up")) for i in range(1, 5)
    ]
    for layer in ("up", "down"):
        expected.append(f"ndtp::all_gather[z] mlp.{layer} B")
    waits = [f"ndtp::wait {name.removeprefix('ndtp::')}" for name in expected if "[" in name]
    moved = {name for name in names if "[" in name and "finish" not in name}
    found = Counter({name: names[name] for name in names if name in moved or not name.startswith("ndtp::finish")})
    assert found == Counter(expected + waits), found


def test_every_chunk_of_a_block_has_its_ranges(ranks):
    ranks(4).run(profiled_block)


def recorded_on_cuda():
    """gloo stages a GPU's tensors through the host: products are timed by events, flights by the host, on one clock."""
    mesh = ProcessGrid(GRID, device_type="cuda")
    large = torch.randn(4096, 4096, device="cuda")
    with Recorder(mesh) as recorder:
        with span(mesh.step.recording.recorder, "gemm", "C"):
            product = large @ large
        mesh.collectives.start(Step("all_gather", ("x",), 0), product, ("up", "A"), "forward").wait()
        with span(mesh.step.recording.recorder, "gemm", "D"):
            product @ large
    first, last = (each for each in recorder.spans() if each.name.startswith("gemm"))
    (flight,) = (each for each in recorder.spans() if each.kind == "collective")
    assert 0 <= first.start < first.end <= flight.end and flight.start < flight.end, (first, flight)
    assert first.end <= last.start < last.end, (first, last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_recorder_times_a_gpu_by_events(ranks):
    ranks(4).run(recorded_on_cuda)
