"""Collectives that wait for each other on full devices are found; at the default of `max_ctas` none of ndtp's do."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import by_turns

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.collectives import backends
from ndtp.collectives.thread_blocks import ctas_that_fit
from ndtp.testing import RecordedCuda, find_deadlock
from ndtp.testing.cuda.multiprocessors import Operation

CUBE = Grid(z=2, x=2, y=2)
WORLD = (0, 1)


def on_two_communicators(lanes=(1, 2), waits=()):
    """A rank's collective on each of two communicators; the second waits for what is named."""
    first, second = lanes
    return [Operation(first, 1, "gather", {}, WORLD), Operation(second, 1, "scatter", dict(waits), WORLD)]


def test_two_collectives_that_do_not_fit_together_wait_for_each_other():
    programs = [on_two_communicators()] * 2
    found = find_deadlock(programs, 10, 6)
    assert found is not None and "rank 0: 0 multiprocessors are free" in found and "of 6)" in found
    assert find_deadlock(programs, 12, 6) is None, "they fit together"
    assert find_deadlock(programs, 10, 6, in_order=True) is None, "NCCL keeps the order of issue"
    assert find_deadlock([on_two_communicators(waits=[(1, 1)])] * 2, 10, 6) is None, "one comes after the other"
    assert "never fits" in str(find_deadlock(programs, 5, 6))


def test_kernels_between_collectives_need_a_multiprocessor_and_are_done_by_themselves():
    """A gather, a kernel of its result, and a scatter of what that made, beside another gather."""

    def program(other):
        return [
            Operation(1, 1, "gather", {}, WORLD), Operation(3, 1, "mm", {1: 1}),
            Operation(2, 1, "scatter", {3: 1}, WORLD), Operation(4, 1, "gather", {}, other),
        ]  # fmt: skip

    assert find_deadlock([program(WORLD)] * 2, 4, 2) is None
    assert find_deadlock([program(WORLD)] * 2, 3, 2) is not None
    assert find_deadlock([program((0,)), program((1,))], 2, 2) is None, "one rank has nobody to wait for"


def recorded(rank, grid, make_step):
    """Operations of a training step, as rank `rank` of eight issues them.

    Args:
        make_step: makes the step on a grid of processes.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        with RecordedCuda(record=True) as cuda:
            step = make_step(ProcessGrid(grid, device_type="cpu", groups_per_axis=2), rank)
            step()
        return cuda.trace
    finally:
        dist.destroy_process_group()


def two_blocks(mesh, rank):
    blocks = [ndtp.nn.MLP(16, 32, mesh=mesh, scheme="3d", chunks=4, seed=0) for _ in range(2)]
    x = blocks[0].in_layout.shard(torch.randn(64, 16), rank).requires_grad_()

    def step():
        y = x
        for block in blocks:
            y = block(y)
        y.square().mean().backward()

    return step


def two_layers_of_llama(mesh, rank):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    model = ndtp.parallelize(LlamaForCausalLM(config), mesh, scheme="3d")
    ids = torch.randint(64, (8, 8))

    def step():
        for _ in range(2):  # the order of the weights is learned in the first
            model(input_ids=ids, labels=ids).loss.backward()
            ndtp.nn.clip_grad_norm_(model.parameters(), 1.0)
            model.zero_grad()

    return step


@pytest.fixture(scope="module")
def programs():
    return [recorded(rank, CUBE, two_blocks) for rank in range(8)]


@pytest.mark.parametrize("multiprocessors", [132, 148], ids=["H200", "B200"])
def test_a_step_of_blocks_never_stands_still_at_the_default(programs, multiprocessors):
    """Six communicators: a quarter of the device is enough for all of them, whatever is outstanding."""
    ctas = ctas_that_fit(multiprocessors, 2, CUBE)
    communicators = {each.lane for each in programs[0] if each.members is not None}
    assert len(communicators) == 6 and len(communicators) * ctas <= multiprocessors // 4
    assert find_deadlock(programs, multiprocessors, ctas, seeds=range(3)) is None


@pytest.mark.parametrize("grid", by_turns([CUBE, Grid(dp=2, x=2, y=2)], 2), ids=str)
def test_a_step_of_a_stock_llama_never_stands_still_at_the_default(grid):
    """Groups over several axes come on top of those of each axis."""
    programs = [recorded(rank, grid, two_layers_of_llama) for rank in range(8)]
    communicators = {each.lane for each in programs[0] if each.members is not None and len(each.members) > 1}
    assert len(communicators) > 3
    assert find_deadlock(programs, 132, ctas_that_fit(132, 2, grid), seeds=range(2)) is None


def test_as_many_thread_blocks_as_nccl_takes_by_itself_stand_still(programs):
    """Five collectives of 32 on 132 multiprocessors, which ranks start in orders of their own."""
    found = find_deadlock(programs, 132, 32)
    assert found is not None and "of 32)" in found
    assert find_deadlock(programs, 132, 32, in_order=True, seeds=range(1)) is None


@dataclass(frozen=True)
class Limited(backends.Backend):
    """torch's fake groups, with the communicators of NCCL on a device of 132 multiprocessors."""

    def multiprocessors(self):
        return 132


def limited_step(monkeypatch, grid, scheme, rank=0):
    """The trace of a stock Llama's first step as one rank issues it, and the grid over which it ran."""
    kind = Limited("fake", has_peers=False, takes_multiprocessors=True, groups_per_axis=2)
    monkeypatch.setitem(backends.KNOWN, "fake", kind)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.num_ranks)
    try:
        with RecordedCuda(record=True) as cuda:
            mesh = ProcessGrid(grid, device_type="cpu")
            config = transformers.LlamaConfig(
                vocab_size=64, num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=8,
                num_key_value_heads=4,
            )  # fmt: skip
            model = ndtp.parallelize(transformers.LlamaForCausalLM(config), mesh, scheme=scheme)
            ids = torch.randint(64, (16, 32))
            model(input_ids=ids, labels=ids).loss.backward()
            ndtp.nn.clip_grad_norm_(model.parameters(), 1.0)
        return cuda.trace, mesh
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("grid", "scheme"),
    [(Grid(x=8), "1d-sp"), (Grid(dp=2, x=2, y=2), "2d"), (CUBE, "3d"), (Grid(dp=2, z=2, x=2, y=2), "3d"),
     (Grid(dp=2, cp=2, x=2), "1d-sp"), (Grid(dp=2, cp=2, z=2, x=2, y=2), "3d"),
     (Grid(dp=2, cp=2, e=2, z=2, x=2, y=2), "3d")],
    ids=str,
)  # fmt: skip
def test_a_stock_model_s_communicators_take_a_quarter_of_a_device(monkeypatch, grid, scheme):
    """Those over several axes are made by the step; all that it uses are counted, on whatever axes."""
    trace, mesh = limited_step(monkeypatch, grid, scheme)
    used = {each.lane for each in trace if each.members is not None and len(each.members) > 1}
    blocks = mesh.options.thread_blocks
    assert len(used) <= len(blocks.by_communicator) and blocks.taken <= 33
    assert len(used) > sum(size > 1 for size in grid.shape)
    assert all(blocks.by_communicator[each] <= mesh.options.max_ctas for each in blocks.by_communicator)


def test_a_step_of_a_stock_model_never_stands_still_at_the_default(monkeypatch):
    steps = [limited_step(monkeypatch, CUBE, "3d", rank) for rank in range(8)]
    programs, meshes = zip(*steps, strict=True)
    assert len({mesh.options.max_ctas for mesh in meshes}) == 1
    assert find_deadlock(programs, 132, meshes[0].options.max_ctas, seeds=range(2)) is None
    assert find_deadlock(programs, 132, 48) is not None, "more than fits stands still"


def test_a_refined_grid_shares_the_quarter(monkeypatch):
    monkeypatch.setitem(
        backends.KNOWN, "fake", Limited("fake", has_peers=False, takes_multiprocessors=True, groups_per_axis=2)
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = ProcessGrid(Grid(x=8), device_type="cpu")
        blocks = mesh.options.thread_blocks
        assert (len(blocks.by_communicator), blocks.each) == (2, 11)
        mesh.refine(x=(2, 4))
        assert list(blocks.by_communicator.values()) == [11, 11, 5, 3, 1, 1] and blocks.taken <= 33
    finally:
        dist.destroy_process_group()
