"""The ring of buffers: bounded, never lent twice, never part of a result or of what autograd saved."""

import gc

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from products import mesh_of

import ndtp
from ndtp import CommunicationError, Grid, Layout, MatMulPlan, ProcessGrid
from ndtp.algebra.steps import Step
from ndtp.collectives.buffer_ring import SMALLEST, BufferRing, size_class
from ndtp.collectives.collectives import Collectives
from ndtp.collectives.gloo import GlooCollectives
from ndtp.testing import assert_equal, small_integers

LIKE = torch.empty(0)
WORDS = SMALLEST // 4  # elements of the smallest buffer


def address(x):
    return x.untyped_storage().data_ptr()


def addresses(ring):
    return {buffer.memory.data_ptr() for buffer in [*ring._waiting, *ring._lent.values()]}


def poison(ring):
    """What waits in the ring belongs to nobody: overwriting it must change nothing."""
    for buffer in ring._waiting:
        buffer.memory.fill_(255)  # NaN in every floating dtype


@given(st.integers(1, 2**40))
def test_size_classes_are_close_and_stable(num_bytes):
    size = size_class(num_bytes)
    assert num_bytes <= size <= max(num_bytes * 9 / 8, num_bytes + 512)
    assert size_class(size) == size


def test_a_buffer_comes_back_and_is_lent_again():
    ring = BufferRing()
    first = ring.borrow((2, WORDS), LIKE)
    second = ring.borrow((2, WORDS), LIKE)
    assert first.shape == (2, WORDS) and first.is_contiguous() and address(first) != address(second)
    assert ring.lent_bytes == 2 * size_class(8 * WORDS) and not ring.waiting_bytes
    ring.give_back([first, second])
    again = ring.borrow((4 * WORDS,), torch.empty(0, dtype=torch.bfloat16))
    assert again.dtype == torch.bfloat16 and address(again) == address(first), "the one that waits longest, any dtype"
    ring.give_back([again])
    ring.give_back([again])  # already there
    assert len(addresses(ring)) == 2 and not ring.lent_bytes


def test_what_is_small_or_has_no_memory_is_left_to_torch():
    ring = BufferRing()
    for x in (ring.borrow((WORDS - 1,), LIKE), ring.borrow((WORDS,), LIKE.to("meta")), ring.borrow((0, 5), LIKE)):
        assert not ring.lent_bytes
        ring.give_back([x])
    ring.give_back([torch.empty(WORDS)])
    ring.forget([torch.empty(WORDS)])
    assert not addresses(ring), "only what was lent is taken back"


def test_the_ring_is_bounded():
    size = size_class(4 * WORDS)
    ring = BufferRing(2 * size)
    lent = [ring.borrow((WORDS,), LIKE) for _ in range(3)]
    assert ring.lent_bytes == 2 * size and address(lent[2]) not in addresses(ring)
    ring.give_back(lent)
    assert ring.waiting_bytes == 2 * size
    larger = ring.borrow((2 * WORDS,), LIKE)
    assert ring.lent_bytes == 2 * size and not ring.waiting_bytes, "sizes that nobody wants any more make room"
    ring.give_back([larger])
    ring.borrow((4 * WORDS,), LIKE)
    assert ring.waiting_bytes == 2 * size, "what can never fit throws nothing out"
    none = BufferRing(0)
    assert none.borrow((WORDS,), LIKE).shape == (WORDS,) and not addresses(none)


def test_a_forgotten_buffer_is_never_lent_again():
    ring = BufferRing()
    lost = ring.borrow((WORDS,), LIKE)
    ring.forget([lost])
    ring.give_back([lost])
    assert not addresses(ring)
    assert address(ring.borrow((WORDS,), LIKE)) != address(lost)


def test_a_buffer_made_under_inference_mode_serves_outside_of_it():
    ring = BufferRing()
    with torch.inference_mode():
        ring.give_back([ring.borrow((WORDS,), LIKE).fill_(1)])
    ring.borrow((WORDS,), LIKE).fill_(2)


@given(st.lists(st.tuples(st.sampled_from(["borrow", "give", "forget"]), st.integers(0, 5)), max_size=60))
def test_no_order_of_calls_lends_memory_twice(calls):
    ring = BufferRing(10 * SMALLEST)
    out = []
    for call, n in calls:
        if call == "borrow":
            x = ring.borrow(((n % 3 + 1) * WORDS,), LIKE)
            assert not {address(x)} & {address(other) for other in out}
            out.append(x)
        elif out:
            x = out.pop(n % len(out))
            (ring.give_back if call == "give" else ring.forget)([x])
        assert ring.lent_bytes + ring.waiting_bytes <= ring.limit_bytes
        assert not addresses(ring) & {buffer.data_ptr() for buffer in out} - set(ring._lent)


def every_kind(own_kernels):
    """No result lies in the ring, and a second round of the same collectives allocates no buffer."""
    mesh = ProcessGrid(Grid(x=4))
    collectives = (GlooCollectives if own_kernels else Collectives)(mesh.groups, mesh.ring, mesh.step.recording)
    for dtype in (torch.float32, torch.bfloat16):
        whole = small_integers((4, 8, 64, 128), 0, dtype, low=-1, high=1)  # [rank, ...]
        mine = whole[mesh.rank]
        steps = [Step(kind, ("x",), dim) for kind in ("all_gather", "reduce_scatter") for dim in range(3)]
        steps += [Step("all_to_all", ("x",), dim, source) for dim in range(3) for source in range(3) if dim != source]
        steps.append(Step("all_reduce", ("x",)))
        operands = (mine, mine.movedim(0, 2).contiguous().movedim(2, 0))  # as it lies, and strided
        rounds, seen = [], []
        for _ in range(2):
            results = []
            for step in steps:
                for x in operands:
                    results.append(collectives.start(step, x, ("test",), "forward").wait())
                    assert address(results[-1]) not in addresses(mesh.ring), f"{step}: a result in the ring"
            assert not mesh.ring.lent_bytes and mesh.ring.waiting_bytes
            seen.append(addresses(mesh.ring))
            rounds.append([result.clone() for result in results])
            poison(mesh.ring)
            assert all(map(torch.equal, results, rounds[-1])), "a result changed with a buffer"
        assert all(map(torch.equal, *rounds)), "used buffers gave other results"
        assert seen[0] == seen[1], f"{dtype}: the second round allocated"


@pytest.mark.parametrize("own_kernels", [True, False])
def test_no_result_lies_in_the_ring(ranks, own_kernels):
    ranks(4).run(every_kind, own_kernels)


def check_saved_tensors(regather, chunks):
    mesh = ProcessGrid(Grid(z=1, x=4, y=2))
    plan = MatMulPlan(
        Layout.parse(mesh.grid, "(z y) x"), Layout.parse(mesh.grid, "(x z) y"), regather=regather, chunks=chunks
    )
    a, b = small_integers((512, 256), 0), small_integers((256, 512), 1)
    grad = small_integers((512, 512), 2)
    first = None
    for _ in range(2):
        operands = [layout.shard(x, mesh.rank).clone() for layout, x in ((plan.a, a), (plan.b, b))]
        leaves = [x.requires_grad_() for x in operands]
        c = ndtp.matmul(*leaves, plan, mesh)
        poison(mesh.ring)
        assert_equal(c, plan.out.shard(a @ b, mesh.rank), "C")
        c.backward(plan.out.shard(grad, mesh.rank))
        poison(mesh.ring)
        assert_equal(leaves[0].grad, plan.a.shard(grad @ b.mT, mesh.rank), "dA")
        assert_equal(leaves[1].grad, plan.b.shard(a.mT @ grad, mesh.rank), "dB")
        assert mesh.ring.waiting_bytes and not mesh.ring.lent_bytes
        assert first in (None, addresses(mesh.ring)), "the second step allocated"
        first = addresses(mesh.ring)
    off = ProcessGrid(mesh.grid, ring_bytes=0)
    assert_equal(ndtp.matmul(*leaves, plan, off), c, "without a ring")
    assert not off.ring.waiting_bytes


@pytest.mark.parametrize("regather,chunks", [((), 2), (("a", "b"), 1), (("a", "b"), 2)], ids=str)
def test_nothing_that_autograd_keeps_lies_in_the_ring(ranks, regather, chunks):
    ranks(8).run(check_saved_tensors, regather, chunks)


def dropped_and_failed():
    mesh = ProcessGrid(Grid(x=2), timeout=2)
    step, x = Step("all_to_all", ("x",), 1, 2), torch.ones(4, 128, 128)
    for _ in range(2):
        mesh.collectives.start(step, x, ("test",), "forward").wait()
    used = addresses(mesh.ring)
    assert len(used) == 2, "what is sent and what is received"
    handle = mesh.collectives.start(step, x, ("test",), "forward")
    assert mesh.ring.lent_bytes
    del handle
    gc.collect()
    assert not addresses(mesh.ring), "a dropped collective may still write to its buffers"
    handle = mesh.collectives.start(step, x, ("test",), "forward")
    handle.wait()
    try:
        handle.wait()
    except ValueError as error:
        assert "waited for already" in str(error), error
    else:
        raise RuntimeError("a handle gave its result twice")
    assert len(addresses(mesh.ring)) == 2
    dist.barrier()
    if mesh.rank == 0:
        handle = mesh.collectives.start(step, x, ("test",), "forward")
        try:
            handle.wait()
        except CommunicationError:
            pass
        else:
            raise RuntimeError("the peer never came")
        assert not addresses(mesh.ring), "a failed collective may still write to its buffers"
    assert not mesh.collectives.in_flight
    dist.barrier()


def test_buffers_of_a_collective_that_was_not_seen_to_end_are_forgotten(ranks):
    ranks(2).run(dropped_and_failed, timeout=60)


def test_one_rank_has_an_empty_ring():
    mesh = mesh_of(Grid(x=1))
    layout = Layout.parse(mesh.grid, "None None")
    ndtp.matmul(torch.ones(256, 256), torch.ones(256, 256), MatMulPlan(layout, layout), mesh)
    assert not addresses(mesh.ring)
