"""The collectives themselves: exact on every dim, low precision summed in fp32, gloo's volume halved, no leaks."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import mesh_of, turned_mesh

from ndtp import CommMeter, CommunicationError, Grid, ProcessGrid, Wire
from ndtp.algebra.steps import POINT_TO_POINT, Step, target_of
from ndtp.collectives import gloo
from ndtp.collectives.backends import backend_named
from ndtp.collectives.collectives import Collectives
from ndtp.collectives.gloo import GlooCollectives
from ndtp.collectives.movers import collectives_of
from ndtp.collectives.summing import SummingCollectives
from ndtp.collectives.symmetric.collectives import SymmetricCollectives
from ndtp.testing import assert_equal, small_integers

GRID = Grid(x=4)


def every_kind(kind, turned):
    """`Collectives` are torch's own, as NCCL would run them; `turned`: over axes that groups have in another order."""
    mesh, axes = (turned_mesh(Grid(x=2, y=2)), ("x", "y")) if turned else (mesh_of(GRID), ("x",))
    assert (mesh.groups.seats(axes) == (0, 2, 1, 3)) is turned
    collectives = kind(mesh.groups, mesh.ring, mesh.step.recording)
    rank, op = mesh.rank, ("test", "A")
    cases = [(dtype, None) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)]

    def run(step, tensor):
        handle = collectives.start(step, tensor, op, "forward")
        assert collectives.in_flight == 1, "held until it is waited for"
        result = handle.wait()
        assert not collectives.in_flight, "let go of"
        out = torch.full_like(result, 99, memory_format=torch.contiguous_format)
        assert collectives.start(step, tensor, op, "forward", out=out).wait().data_ptr() == out.data_ptr()
        assert_equal(out, result, f"{step} into `out`")
        return result

    for dtype, wire in [*cases[::2], (torch.float32, "bf16")] if turned else cases:
        collectives.wire = Wire.of(wire)
        whole = small_integers((4, 8, 4, 12), 0, dtype, low=-1, high=1)  # [rank, ...]
        # torch's own exchange over gloo takes parts of one size alone.
        for move in POINT_TO_POINT if issubclass(kind, GlooCollectives) and wire is None else ():
            source = next(i for i in range(4) if target_of(move, i, 4) == rank)
            assert_equal(run(Step(move, axes), whole[rank]), whole[source], move)
        for dim in range(3):
            expected = torch.cat(tuple(whole), dim)
            assert_equal(run(Step("all_gather", axes, dim), whole[rank]), expected, f"all_gather, dim {dim}")
            total = whole.sum(0)
            expected = total.chunk(4, dim)[rank]
            assert_equal(run(Step("reduce_scatter", axes, dim), whole[rank]), expected, f"reduce_scatter, dim {dim}")
            for source in set(range(3)) - {dim}:
                expected = torch.cat([part.chunk(4, dim)[rank] for part in whole], source)
                result = run(Step("all_to_all", axes, dim, source), whole[rank])
                assert_equal(result, expected, f"all_to_all, {source} -> {dim}")
        kept = whole[rank].clone()
        assert_equal(run(Step("all_reduce", axes), kept), whole.sum(0), "all_reduce")
        assert_equal(kept, whole[rank], "the operand is left as it was")
        strided = whole[rank].movedim(0, 2)
        assert_equal(run(Step("all_reduce", axes), strided), whole.sum(0).movedim(0, 2), "all_reduce, strided")
        odd = small_integers((4, 3, 5), 1, dtype)
        assert_equal(run(Step("all_reduce", axes), odd[rank]), odd.sum(0), "all_reduce of 15 elements over 4 ranks")
        if wire is None:
            empty = run(Step("all_gather", axes, 0), whole[rank, :0])
            assert empty.shape == (0, 4, 12), "nothing to gather"


@pytest.mark.parametrize("kind", [GlooCollectives, Collectives, SummingCollectives, SymmetricCollectives])
@pytest.mark.parametrize("turned", [False, True])
def test_every_kind_on_every_dim(ranks, kind, turned):
    if kind in (Collectives, SummingCollectives) and turned and torch.__version__ < "2.13":
        pytest.skip("torch's own gloo exchanges no lists of tensors before 2.13")
    ranks(4).run(every_kind, kind, turned)


def sums_of_two():
    """Of two ranks an all-reduce is one exchange, except of an odd number of elements."""
    mesh = mesh_of(Grid(x=2))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for shape in ((4, 6), (3, 5), (2,), (), (0, 3), (256, 300)):
            whole = small_integers((2, *shape), 0, dtype)
            mine = whole[mesh.rank].clone()
            strided = mine.repeat_interleave(2, -1)[..., ::2] if shape else mine
            out = torch.empty(shape, dtype=dtype)
            with CommMeter() as meter:
                handle = mesh.collectives.start(Step("all_reduce", ("x",)), strided, ("test",), "forward")
                if shape:
                    strided.zero_()  # sent is what it was
                assert_equal(handle.wait(), whole.sum(0), f"{dtype} {shape}")
            assert meter.volume.total == 2 * -(-mine.numel() // 2) * mine.element_size(), meter.volume
            handle = mesh.collectives.start(Step("all_reduce", ("x",)), mine, ("test",), "forward", out=out)
            assert handle.wait().data_ptr() == out.data_ptr()
            assert_equal(out, whole.sum(0), f"{dtype} {shape}, put where it was asked to")
    assert not mesh.ring.lent_bytes and not mesh.collectives.in_flight


def test_all_reduces_of_two_ranks(ranks):
    ranks(2).run(sums_of_two)


def refused():
    mesh = mesh_of(GRID)
    x, gather, alltoall = torch.ones(4, 4), Step("all_gather", ("x",), 1), Step("all_to_all", ("x",), 0, 1)
    turned = torch.ones(16, 4).mT
    wrong = [
        (step, {"out": out})
        for step in (gather, Step("reduce_scatter", ("x",), 1), Step("all_reduce", ("x",)), alltoall)
        for out in (torch.ones(16, 5), turned, turned.contiguous().double())
    ]
    wrong += [(gather, {"out": torch.ones(4, 16), "blocks": True}), (alltoall, {"blocks": True})]
    for step, how in wrong:
        with pytest.raises(ValueError, match=r"does not fit into `out`|blocks of columns come of a gather"):
            mesh.collectives.start(step, x, ("test",), "forward", **how)
    assert not mesh.collectives.in_flight


def test_what_cannot_be_done_is_refused(ranks):
    """On one rank, before anything is sent."""
    ranks(4).run(refused)


def low_precision_sums(mover):
    """256 + 1 + 1 + 1 is 259 in fp32, rounds to 260 in bf16; hop by hop in bf16 every 1 is lost."""
    mesh = ProcessGrid(GRID, collectives="symmetric" if mover == "symmetric" else "torch")
    if mover == "of NCCL":  # what a grid of NCCL takes, over the groups at hand
        mesh.groups.options, mesh.groups.kind = replace(mesh.groups.options, sums="fp32"), backend_named("another")
        mesh.collectives = collectives_of(mesh.groups, mesh.ring, mesh.step.recording, None)
        assert type(mesh.collectives) is SummingCollectives
    value = torch.full((8,), 256.0 if mesh.rank == 0 else 1.0, dtype=torch.bfloat16)
    for step in (Step("all_reduce", ("x",)), Step("reduce_scatter", ("x",), 0)):
        with CommMeter() as meter:
            result = mesh.collectives.start(step, value, ("test",), "forward").wait()
        assert_equal(result, torch.full_like(result, 260.0), step.kind)
        assert meter.volume.total == 8 * 3 // 4 * 2 * (2 if step.kind == "all_reduce" else 1), meter.volume


@pytest.mark.parametrize("mover", ["torch", "symmetric", "of NCCL"])
def test_low_precision_is_summed_in_fp32(ranks, mover):
    ranks(4).run(low_precision_sums, mover)


def wire_bytes():
    """What ndtp's reduce-scatter sends on gloo is one block to each peer."""
    mesh = mesh_of(GRID)
    sent = []
    exchange = gloo.exchange

    def spy(group, blocks, landing, purpose, **how):
        sent.extend(block.numel() for j, block in enumerate(blocks) if j != group.rank())
        return exchange(group, blocks, landing, purpose, **how)

    with mock.patch.object(gloo, "exchange", spy), CommMeter() as meter:
        mesh.collectives.start(Step("reduce_scatter", ("x",), 0), torch.ones(8, 3), ("test",), "forward").wait()
    assert sent == [6, 6, 6], sent
    assert meter.volume.by("collective") == {"reduce_scatter": 4 * 24 * 3 // 4}, meter.volume


def test_reduce_scatter_sends_each_block_once_on_gloo(ranks):
    ranks(4).run(wire_bytes)


def failures_keep_no_handle():
    mesh = ProcessGrid(GRID, timeout=2)
    if mesh.rank == 0:
        handle = mesh.collectives.start(Step("all_gather", ("x",), 0), torch.ones(2), ("test",), "forward")
        try:
            handle.wait()
        except CommunicationError as error:
            assert "all_gather of test (forward) over axis x" in str(error), error
            assert "waited for ranks 1, 2, 3" in str(error), error
        else:
            raise AssertionError("no error")
        assert not mesh.collectives.in_flight, "a failed collective is not in flight any more"
    dist.barrier()


def test_a_failed_handle_is_not_in_flight(ranks):
    ranks(4).run(failures_keep_no_handle, timeout=60)


def test_one_rank():
    mesh = mesh_of(Grid(x=1))
    assert type(mesh.collectives) is Collectives and not mesh.collectives.in_flight
