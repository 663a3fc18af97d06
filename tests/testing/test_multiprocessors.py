"""Collectives that wait for each other on full devices are found; at the default of `max_ctas` none of ndtp's do."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.collectives.grid_options import ctas_that_fit
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


def program(rank, chunks):
    """Operations of a step of two blocks, as rank `rank` of eight issues them."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        with RecordedCuda(record=True) as cuda:
            mesh = ProcessGrid(CUBE, device_type="cpu", groups_per_axis=2)
            blocks = [ndtp.nn.MLP(16, 32, mesh=mesh, scheme="3d", chunks=chunks, seed=0) for _ in range(2)]
            y = blocks[0].in_layout.shard(torch.randn(64, 16), rank).requires_grad_()
            for block in blocks:
                y = block(y)
            y.square().mean().backward()
        return cuda.trace
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def programs():
    return [program(rank, 4) for rank in range(8)]


@pytest.mark.parametrize("multiprocessors", [132, 148], ids=["H200", "B200"])
def test_a_step_of_blocks_never_stands_still_at_the_default(programs, multiprocessors):
    """Six communicators: a quarter of the device is enough for all of them, whatever is outstanding."""
    ctas = ctas_that_fit(multiprocessors, 2, CUBE)
    communicators = {each.lane for each in programs[0] if each.members is not None}
    assert len(communicators) == 6 and len(communicators) * ctas <= multiprocessors // 4
    assert find_deadlock(programs, multiprocessors, ctas, seeds=range(3)) is None


def test_as_many_thread_blocks_as_nccl_takes_by_itself_stand_still(programs):
    """Five collectives of 32 on 132 multiprocessors, which ranks start in orders of their own."""
    found = find_deadlock(programs, 132, 32)
    assert found is not None and "of 32)" in found
    assert find_deadlock(programs, 132, 32, in_order=True, seeds=range(1)) is None
