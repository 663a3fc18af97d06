"""ndtp as a GPU would order it: by `ndtp.testing.RecordedCuda`, on one rank of a fake world."""

import gc
import threading
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import by_turns

import ndtp
from ndtp import CommunicationError, Grid, ProcessGrid
from ndtp.algebra.steps import Step
from ndtp.collectives import buffer_ring
from ndtp.collectives.flight import LEFT
from ndtp.collectives.summing import SummingCollectives
from ndtp.collectives.symmetric.collectives import SymmetricCollectives
from ndtp.collectives.symmetric.device import DeviceExchange
from ndtp.compute.gemm import KernelGemm
from ndtp.nn.random import draw_seed, key_of
from ndtp.runtime import weight_prefetch
from ndtp.testing import CudaFault, RecordedCuda

pytestmark = pytest.mark.cpu

GRIDS = {
    "3d": Grid(z=2, x=2, y=2), "2d": Grid(x=2, y=4), "2d-features": Grid(x=4, y=2), "1d-sp": Grid(x=8), "1d": Grid(x=8),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@contextmanager
def no_small_buffers():
    """The ring lends every buffer."""
    with mock.patch.object(buffer_ring, "SMALLEST", 1):
        yield


class Model:
    """Blocks one behind another on a grid, and a training step of them."""

    def __init__(self, scheme="3d", chunks=1, blocks=2, collectives=None, kernels=False, **options):
        self.mesh = ProcessGrid(GRIDS[scheme], device_type="cpu", groups_per_axis=2)
        if collectives is not None:
            made = collectives(self.mesh.groups, self.mesh.ring, self.mesh.step.recording)
            self.mesh.collectives = made
        if kernels:  # which add up what arrives in one pass with what follows
            self.mesh.gemm = KernelGemm()
        made = {"mesh": self.mesh, "scheme": scheme, "chunks": chunks, "seed": 0, **options}
        self.blocks = [ndtp.nn.MLP(32, 64, activation="gelu", **made) for _ in range(blocks)]
        whole = torch.randn(64, 32, dtype=options.get("dtype"))
        self.x = self.blocks[0].in_layout.shard(whole, 0).clone().requires_grad_()
        self.parameters = [p for block in self.blocks for p in block.parameters()]

    def loss(self, x=None):
        y = self.x if x is None else x
        for block in self.blocks:
            y = block(y)
        return y.square().mean()

    def step(self, x=None):
        self.loss(x).backward()
        for p in self.parameters:
            p.grad = None


def plain(model):
    model.step()


def accumulated(model):
    with model.mesh.accumulate():
        model.step()
    model.step()
    model.mesh.reduce_gradients()


def interleaved(model):
    model.mesh.interleave(lambda x: model.loss(x).backward(), model.x.detach().chunk(2))


def broken_off(model):
    loss = model.loss()
    model.blocks[0].up.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    model.blocks[0].up.weight._backward_hooks.clear()
    model.step()


def input_alone(model):
    torch.autograd.grad(model.loss(), model.x)


SYMMETRIC = {"collectives": SymmetricCollectives}
FEATURES = {
    "plain": (plain, {}),
    "regather": (plain, {"regather": ("a", "b")}),
    "kernels": (plain, {"kernels": True}),
    "fp32 sums": (plain, {"collectives": SummingCollectives, "kernels": True, "dtype": torch.bfloat16}),
    "accumulated": (accumulated, {}),
    "interleaved": (interleaved, {}),
    "broken off": (broken_off, {}),
    "input alone": (input_alone, {}),
    "symmetric": (plain, SYMMETRIC),
    "symmetric, kernels": (plain, {**SYMMETRIC, "kernels": True}),
    "symmetric, accumulated": (accumulated, SYMMETRIC),
    "symmetric, interleaved": (interleaved, SYMMETRIC),
    "symmetric, broken off": (broken_off, SYMMETRIC),
}
CASES = [(scheme, chunks, feature) for feature in FEATURES for chunks in (1, 2, 4) for scheme in GRIDS]


@pytest.mark.parametrize(("scheme", "chunks", "feature"), by_turns(CASES, 8))
def test_streams_touch_nothing_too_early_and_all_is_waited_for(scheme, chunks, feature):
    """Every scheme, number of chunks and feature, which take eight turns."""
    run, options = FEATURES[feature]
    with no_small_buffers(), RecordedCuda() as cuda:
        model = Model(scheme=scheme, chunks=chunks, **options)
        for _ in range(2):
            run(model)
        assert not model.mesh.collectives.in_flight and not model.mesh.ring.lent_bytes
        assert len(set(map(str, cuda.all_lanes()))) > 1
        flight = model.mesh.collectives.flight  # of which hosts tell each other, since none waits
        assert flight is None or flight.left_to_device() == flight.last()[-LEFT:] != []


FOUND = {"unwaited": "nobody waited for", "given back early": "race: ", "not held": "early free: "}


@pytest.mark.parametrize("fault", FOUND)
def test_it_sees_into_the_schedule(fault):
    """Break what orders a collective of ndtp: each is found."""
    from ndtp.collectives.handles import Handle

    start = Handle.__init__

    def broken(self, owner, route, started, entry, label=None):
        work, finish, held, borrowed = started
        if fault == "given back early":
            owner.ring.give_back(borrowed)
        start(
            self, owner, route,
            (None if fault == "unwaited" else work, finish, () if fault == "not held" else held, borrowed),
            entry, label,
        )  # fmt: skip

    breaking = mock.patch.object(Handle, "__init__", broken)
    with no_small_buffers(), pytest.raises(CudaFault, match=FOUND[fault]), breaking, RecordedCuda():
        Model(chunks=2).step()


def test_a_dropped_handle_orders_the_stream_on_which_it_was_started_whoever_collects_it():
    with RecordedCuda():
        mesh, x = ProcessGrid(GRIDS["3d"], device_type="cpu"), torch.zeros(64)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            handles = [mesh.collectives.start(Step("all_gather", ("x",), 0), x * 1, ("test",), "forward")]
        collector = threading.Thread(target=handles.clear)
        collector.start()
        collector.join()
        torch.cuda.current_stream().wait_stream(side)


# -------------------------------------------------------------------------------------------------------------- graphs


def captured(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize(("blocks", "mends"), [(1, True), (3, True), (1, False)])
def test_blocks_are_captured_alone(blocks, mends):
    """A gather for the next block, or from the last call, would cross the edge of the graph."""
    crossing = mock.patch.multiple(weight_prefetch, may_start_ahead=lambda _: True, is_capturing=lambda _: False)
    found = nullcontext() if mends else pytest.raises((CudaFault, CommunicationError), match=r"Capture|captured")
    with found, nullcontext() if mends else crossing, RecordedCuda():
        model = Model(blocks=3)
        for _ in range(2):
            model.step()
        whole, model.blocks = model.blocks, model.blocks[:blocks]
        with torch.no_grad():
            model.loss()  # leaves a gather for the next block
        graph = captured(model.loss)
        for _ in range(2):
            graph.replay()
        model.blocks = whole
        model.step()
        gc.collect()


@pytest.mark.parametrize("mends", [True, False], ids=["mended", "as it was"])
def test_symmetric_memory_is_captured_and_its_windows_outlive_graphs(mends):
    def wait(self):
        torch.cuda.current_stream().wait_event(self.events[-1][1])

    as_it_was = mock.patch.object(DeviceExchange, "wait", wait)
    if not mends:
        with pytest.raises(CudaFault, match="Unjoined"), as_it_was, RecordedCuda():
            model = Model(collectives=SymmetricCollectives)
            model.step()
            captured(model.step)
    else:
        with RecordedCuda():
            model = Model(collectives=SymmetricCollectives)
            model.step()
            graph = captured(model.step)
            big = torch.zeros(2**16, 2)
            model.mesh.collectives.start(Step("all_gather", ("x",), 0), big, ("test",), "forward").wait()
            graph.replay()
            torch.cuda.synchronize()
            model.mesh.collectives._outgrown.clear()
            gc.collect()
            with pytest.raises(CudaFault, match="freed since the capture"):
                graph.replay()


@pytest.mark.parametrize("mends", [True, False], ids=["mended", "as it was"])
def test_dropout_draws_anew_in_every_replay(mends):
    in_host = mock.patch("ndtp.nn.dropout.draw_key", lambda name, device: key_of(draw_seed(), name))
    found = nullcontext() if mends else pytest.raises(CudaFault, match="the host reads")
    with found, nullcontext() if mends else in_host, RecordedCuda():
        mesh = ProcessGrid(Grid(x=1), device_type="cpu")
        drop, x, seen = ndtp.nn.Dropout(0.5, ndtp.Layout(mesh.grid, None, None), mesh), torch.ones(8, 8), []
        graph = captured(lambda: seen.append(drop(x)))
        masks = []
        for _ in range(3):
            graph.replay()
            masks.append(seen[0].clone())
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
