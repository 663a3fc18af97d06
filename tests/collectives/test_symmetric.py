"""Symmetric memory: in one process as every rank, and on real ranks in shared memory: exact, and the same bytes."""

import functools
import os
import subprocess
import time
from unittest import mock

import products
import pytest
import torch
import torch.distributed as dist
from products import Product, check_products, scheme_product

import ndtp
from ndtp import CommMeter, CommunicationError, Grid, GridError, MismatchError, ProcessGrid
from ndtp.algebra.steps import Step
from ndtp.collectives.recorder import Recorder
from ndtp.collectives.symmetric import collectives, device, windows
from ndtp.collectives.symmetric.host import HostEngine, Progress
from ndtp.collectives.symmetric.protocol import SLOTS, arrivals
from ndtp.collectives.symmetric.windows import FREE, READY, windows_in_process
from ndtp.testing import assert_equal, small_integers

# ------------------------------------------------------------------------------------------ all ranks in one process


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_ranks_of_one_process(ranks):
    """Each pulls what its peers have for it; several exchanges are under way at a time, more than there are slots."""
    progress = Progress()
    engines = [HostEngine(window, progress, timeout=20) for window in windows_in_process(ranks, 64 * ranks)]
    sent = small_integers((7, ranks, ranks, 64), 0, torch.uint8, low=0, high=9)  # [exchange, from, to, bytes]
    landed, under_way = torch.zeros_like(sent), []
    for number in range(7):
        parted = number % 3 != 0
        for rank, engine in enumerate(engines):
            parts = sent[number, rank] if parted else sent[number, rank, :1].expand(ranks, -1)
            work = engine.exchange(parts.unbind(), landed[number, rank].unbind(), parted, purpose=number)
            under_way.append((number, rank, parted, work))
        for *_, work in under_way[: -SLOTS * 2 * ranks] if number % 2 else []:
            work.wait()
    for number, rank, parted, work in reversed(under_way):
        work.wait()
        assert sorted(work.arrived) == list(range(ranks)) and work.arrived == list(arrivals(rank, ranks))
        expected = sent[number, :, rank] if parted else sent[number, :, 0]
        assert torch.equal(landed[number, rank], expected), (number, rank)


def test_parts_are_told_as_they_come():
    """A product may begin with its own rows when nobody else has sent any."""
    progress = Progress()
    mine, other = (HostEngine(window, progress, timeout=20) for window in windows_in_process(2, 64))
    x, landing = torch.arange(8, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8)
    work = mine.exchange([x] * 2, landing.unbind(), False)
    parts = work.parts()
    assert next(parts) == 0 and torch.equal(landing[0], x) and work.arrived == [0]
    other.exchange([x + 8] * 2, torch.zeros(2, 8, dtype=torch.uint8).unbind(), False)
    assert list(parts) == [1] and torch.equal(landing[1], x + 8)


def test_what_never_comes_and_what_is_not_meant():
    progress = Progress()
    mine, other = (HostEngine(window, progress, timeout=0.3) for window in windows_in_process(2, 64))
    x = torch.zeros(2, 8, dtype=torch.uint8)
    late = mine.exchange(x.unbind(), x.clone().unbind(), True, purpose=1)
    begin = time.monotonic()
    with pytest.raises(CommunicationError, match=r"rank 1 of the group did not come within 0.3 s"):
        late.wait()
    assert time.monotonic() - begin < 5
    with pytest.raises(CommunicationError, match=r"rank . of the group runs another collective"):
        other.exchange(x.unbind(), x.clone().unbind(), True, purpose=2).wait()


# ----------------------------------------------------------------------------------------------------- on real ranks


@functools.cache
def symmetric_mesh(grid):
    return ProcessGrid(grid, collectives="symmetric")


def products_are_exact(cases):
    """With the bytes of the plan: `check_product` compares them."""
    with mock.patch.object(products, "mesh_of", symmetric_mesh):
        check_products(cases)


def test_schemes_are_exact_and_move_what_the_plan_says(ranks):
    grid = Grid(x=2, y=4)
    cases = [scheme_product(name, bias=True, dtype=torch.bfloat16) for name in ("3d", "2d feature split", "1d row")]
    cases += [scheme_product("3d", options={"chunks": 2}), scheme_product("2d row split", options={"chunks": 2})]
    cases.append(Product(grid, "y None", "None None", (16, 32), (32, 8), "None y"))  # an all-to-all
    for num_ranks in (8, 4):
        ranks(num_ranks).run(products_are_exact, [case for case in cases if case.grid.num_ranks == num_ranks])


def blocks_are_exact(sizes):
    """A step of a block: weights gathered ahead, gradients that arrive late, rows multiplied as they come."""
    grid = Grid(sizes)
    results = []
    for mover in ("torch", "symmetric"):
        mesh = ProcessGrid(grid, collectives=mover, timeout=60)
        block = ndtp.nn.MLP(16, 32, activation="relu", mesh=mesh, chunks=1, seed=3)
        x = block.in_layout.shard(small_integers((32, 16), 1), mesh.rank).clone().requires_grad_()
        volumes = []
        for _ in range(3):
            with CommMeter() as meter:
                y = block(x)
                y.sum().backward()
            volumes.append(meter.volume)
        results.append([y, x.grad, *(getattr(p.grad, "_local_tensor", p.grad) for p in block.parameters()), volumes])
        assert not mesh.collectives.in_flight and not mesh.ring.lent_bytes
        assert any("own " in str(program) for program in mesh.programs._found.values()), "this grid gathers rows"
    (*expected, volumes), (*found, other) = results
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(one, two)
    assert volumes == other


@pytest.mark.parametrize("sizes", [{"z": 1, "x": 1, "y": 2}, {"z": 2, "x": 1, "y": 2}], ids=str)
def test_a_block_trains_as_with_torch(ranks, sizes):
    ranks(Grid(sizes).num_ranks).run(blocks_are_exact, sizes)


def windows_grow_and_are_let_go():
    mesh = ProcessGrid(Grid(x=2), collectives="symmetric", timeout=60)
    step = Step("all_gather", ("x",), 0)
    seen = []
    for rows in (8, 1 << 17, 8):
        x = torch.full((rows, 2), float(mesh.rank))
        handle = mesh.collectives.start(step, x, ("test",), "forward")
        assert_equal(handle.wait(), torch.arange(2.0).repeat_interleave(rows)[:, None].expand(-1, 2), f"{rows} rows")
        seen.append(mesh.collectives._engines[mesh.group(("x",))].window.slot_bytes)
    assert seen[0] == collectives.SMALLEST_SLOT < seen[1] == seen[2]
    dropped = mesh.collectives.start(step, torch.ones(4, 2), ("test",), "forward")
    del dropped
    assert_equal(mesh.collectives.start(step, torch.ones(4, 2), ("test",), "forward").wait(), torch.ones(8, 2), "after")
    assert not mesh.collectives.in_flight
    dist.barrier()
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"ndtp_{os.getpid()}_")]


def test_windows_grow_and_leave_no_file(ranks):
    assert ranks(2).run(windows_grow_and_are_let_go) == [[], []]


def recorded():
    mesh = symmetric_mesh(Grid(x=2))
    with Recorder(mesh) as recorder:
        x = torch.ones(4, 2)
        mesh.collectives.start(Step("all_reduce", ("x",)), x, ("test",), "forward").wait()
    return [span.kind for span in recorder.spans()]


def test_a_recorder_sees_its_flights(ranks):
    for kinds in ranks(2).run(recorded):
        assert "collective" in kinds and "wait" in kinds


def test_a_process_that_has_ended_is_named_long_before_the_timeout():
    ended = subprocess.Popen(["true"])
    mine, _ = windows_in_process(2, 64)
    mine.processes = [os.getpid(), ended.pid]
    x = torch.zeros(2, 8, dtype=torch.uint8)
    for _ in range(2):
        work = HostEngine(mine, Progress(), timeout=60).exchange([x[0]] * 2, x.unbind(), False)
        begin = time.monotonic()
        with pytest.raises(CommunicationError, match="the process of rank 1 of the group has ended"):
            work.wait()
        assert time.monotonic() - begin < 20
        ended.wait()  # a zombie first, and then gone
        mine = windows_in_process(2, 64)[0]
        mine.processes = [os.getpid(), ended.pid]


# --------------------------------------------------------------------------------------------- where it cannot be had


def refused_on_another_machine():
    elsewhere = mock.patch.object(collectives, "machine", lambda: f"host{dist.get_rank()}")
    with elsewhere, pytest.raises(MismatchError, match="whose memory they can read") as caught:
        ProcessGrid(Grid(x=2), collectives="symmetric")
    unusable = mock.patch.object(collectives, "unusable_host", lambda: "a processor (abacus)")
    with unusable, pytest.raises(GridError, match=r"abacus\)\n  fix: collectives='torch'"):
        ProcessGrid(Grid(x=2), collectives="symmetric")
    with mock.patch.object(windows.os, "posix_fallocate", side_effect=OSError(28, "No space left on device")):
        mesh = ProcessGrid(Grid(x=2), collectives="symmetric")
        with pytest.raises(CommunicationError, match=r"No space left(.|\n)*--shm-size"):
            mesh.collectives.start(Step("all_gather", ("x",), 0), torch.ones(4), ("test",), "forward")
    return str(caught.value).partition("\n")[0]


def test_it_says_why_it_cannot_be_had_on_every_rank(ranks):
    one, other = ranks(2).run(refused_on_another_machine)
    assert one == other


def test_a_backend_that_it_does_not_go_with():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(GridError, match="takes gloo for CPUs and NCCL for GPUs, not fake"):
            ProcessGrid(Grid(x=2), collectives="symmetric", device_type="cpu")
    finally:
        dist.destroy_process_group()
    assert ProcessGrid(Grid(x=1), collectives="symmetric").rank == 0, "one rank has nobody to read from"


# ----------------------------------------------------------------------------------------------- torch's own, on GPUs


class Handle:
    """torch's `_SymmetricMemory`, which refuses arguments that the real one does not take."""

    rank, world_size = 1, 4

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        from torch._C._distributed_c10d import _SymmetricMemory

        signature = getattr(_SymmetricMemory, name).__doc__.partition(" -> ")[0]
        parameters = [part.partition(":")[0].strip() for part in signature.partition("(")[2].split(", ")[1:]]

        def call(*given):
            assert len(given) <= len([p for p in parameters if p.isidentifier()]), (name, given, parameters)
            self.calls.append((name, *given))
            return given

        return call


def test_calls_of_torch_are_as_torch_declares_them():
    handle = Handle()
    window = device.DeviceWindow(handle, torch.empty(0), 1024, timeout=2.5)
    channels = {(name, peer, channel) for name, peer, channel, timeout in handle.calls}
    assert channels == {("put_signal", peer, 2 * slot + FREE) for peer in (0, 2, 3) for slot in range(SLOTS)}
    assert {call[3] for call in handle.calls} == {2500}
    assert window.part(3, 1, 96, 32) == (3, (32,), torch.uint8, 1024 + 96)
    window.put(2, 1, READY), window.take(0, 0, READY)
    assert handle.calls[-2:] == [("put_signal", 2, 3, 2500), ("wait_signal", 0, 1, 2500)]
    for peer, signals in ((0, SLOTS * 2), (3, SLOTS * 2)):
        assert (signals - 1) * handle.world_size + peer < 2048 // 4, "torch's pads are of 2 KiB, or more"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none")
@pytest.mark.parametrize("parted", [False, True])
def test_all_ranks_on_one_device(parted):
    ranks, size = 4, 1 << 20
    engines = [device.DeviceEngine(w) for w in device.LocalWindow.of_all(ranks, ranks * size, torch.device("cuda"))]
    sent = torch.randint(0, 255, (5, ranks, ranks, size), dtype=torch.uint8, device="cuda")
    landed = torch.zeros_like(sent)
    for number in range(5):
        staged = []
        for rank, engine in enumerate(engines):
            parts = sent[number, rank] if parted else sent[number, rank, :1].expand(ranks, -1)
            staged.append(engine.stage(parts.unbind(), landed[number, rank].unbind(), parted))
        for engine, exchange in zip(engines, staged, strict=True):
            engine.pull(exchange)
        for rank, exchange in enumerate(staged):
            exchange.wait()
            expected = sent[number, :, rank] if parted else sent[number, :, 0]
            assert torch.equal(landed[number, rank], expected)
