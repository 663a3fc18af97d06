"""Predicted bytes are those that a forward and backward really hold, and `regather` and chunks change them."""

from __future__ import annotations

import functools
import gc
import random
from dataclasses import astuple
from itertools import product
from unittest.mock import Mock

import products  # noqa: F401  (so that tiny products go the way of large ones)
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from turns import by_turns

import ndtp
from ndtp import Grid, Layout, LayoutError, MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.ops.memory import LiveBytes, measured, memory
from ndtp.planner import block_cost
from ndtp.planner.block_cost import Block, Grids

pytestmark = pytest.mark.cpu

TOKENS, HIDDEN, INNER = 96, 16, 48
CASES = [
    (Grid(z=2, x=2, y=2), "3d"),
    (Grid(dp=2, z=2, x=1, y=2), "3d"),
    (Grid(x=2, y=4), "2d"),
    (Grid(x=2, y=4), "2d-features"),
    (Grid(x=8), "1d-sp"),
    (Grid(x=8), "1d"),
]
REGATHER = ((), ("a",), ("b",), ("a", "b"))
POLICIES = (((), 1), ((), 3), (("a",), 2), (("b",), 1), (("a", "b"), 3))  # regather, chunks


@functools.cache
def mesh_without_ring(grid):
    gc.freeze()  # what was imported by now is nobody's garbage, and need not be searched
    return ndtp.ProcessGrid(grid, ring_bytes=0)


def of_module(block, x, grad, predicted):
    """The least of two, or of three: a thread of gloo may hold what it sent for a moment longer."""
    runs, least = [], None
    while len(runs) < 2 or (len(runs) < 3 and least != predicted):
        block.zero_grad()
        x.grad = None
        gc.collect()
        runs.append(astuple(measured(lambda: block(x), grad)))
        least = tuple(map(min, zip(*runs, strict=True)))
    return least


def said_by(rank, memory):
    """What one rank predicts: the prediction is that of the shapes of shards, which are alike on all ranks."""
    told = [astuple(memory()) if dist.get_rank() == rank else None]
    dist.broadcast_object_list(told, rank)
    return told[0]


def check_blocks(grid, scheme):
    mesh = mesh_without_ring(grid)
    for turn, (regather, chunks) in enumerate(POLICIES, CASES.index((grid, scheme))):
        kind = (ndtp.nn.MLP, ndtp.nn.GatedMLP)[turn % 2]  # by turns, and otherwise on the next grid
        block = kind(HIDDEN, INNER, mesh=mesh, scheme=scheme, chunks=chunks, regather=regather)
        x = torch.randn(block.in_layout.shard_shape((TOKENS, HIDDEN)), requires_grad=True)
        predicted = said_by(turn % grid.num_ranks, lambda block=block: block.memory(TOKENS))
        found = of_module(block, x, torch.randn_like(x), predicted)
        assert found == predicted, f"{kind} {scheme} {grid} {regather} {chunks}: {found} {predicted}"


@pytest.mark.parametrize("grid,scheme", by_turns(CASES, 3), ids=str)
def test_a_block_holds_what_is_predicted(ranks, grid, scheme):
    ranks(8).run(check_blocks, grid, scheme)


def check_linears():
    """One product; a frozen weight, no bias, low precision, an input without a gradient."""
    mesh = mesh_without_ring(Grid(dp=2, z=2, y=2, x=1))
    for frozen, bias, dtype, dgrad in (
        (False, True, torch.float32, True),
        (True, True, torch.float32, True),
        (False, False, torch.bfloat16, True),
        (False, True, torch.float64, False),
    ):
        layer = ndtp.nn.Linear(HIDDEN, INNER, bias, mesh=mesh, dtype=dtype, chunks=2)
        layer.weight.requires_grad_(not frozen)
        x = torch.randn(layer.in_layout.shard_shape((TOKENS, HIDDEN)), dtype=dtype, requires_grad=dgrad)
        grad = torch.randn(layer.out_layout.shard_shape((TOKENS, INNER)), dtype=dtype)
        predicted = said_by(mesh.grid.num_ranks - 1, lambda layer=layer, dgrad=dgrad: layer.memory(TOKENS, dgrad))
        assert of_module(layer, x, grad, predicted) == predicted, (frozen, bias, dtype, dgrad)


def test_a_linear_holds_what_is_predicted(ranks):
    ranks(8).run(check_linears)


def test_the_counter_counts_storages_once_and_forgets_them():
    given = torch.zeros(100)
    with LiveBytes() as live:
        view, made = given.view(10, 10), given + 1  # a view is no memory, a sum is
        assert live.now == 400
        half = made[:50]
        del made
        assert live.now == 400, "held by its view"
        del half
        assert (live.now, live.peak) == (0, 400)
        view.add_(1)
        both = torch.empty(10), torch.empty(20)
        assert (live.now, live.peak) == (120, 400)
        del both
        torch.ones(100, out=given)  # given by its name
        several = torch._foreach_add([given, given], 1)  # in a list
        assert live.now == 800
        del several
        with FakeTensorMode():
            without_memory = torch.empty(100)
        assert live.now == 0
        del without_memory
        on_meta = torch.empty(100, device="meta")
        assert live.now == 400
        del on_meta
    assert live.now == 0


def block_of(grid, **options):
    return block_layouts(grid, "3d").plans("block", **options)


def test_regather_lowers_what_is_kept_and_chunks_what_is_gathered_at_a_time():
    sizes = (8192, 1024, 4096, 1024)
    kept = {again: memory(block_of(Grid(z=4, x=4, y=4), regather=again), sizes).kept for again in REGATHER}
    assert kept["a", "b"] < min(kept["a",], kept["b",]) and max(kept["a",], kept["b",]) < kept[()]
    once, often = (memory(block_of(Grid(z=1, x=1, y=8), regather=("a",), chunks=c), sizes) for c in (1, 4))
    assert often.forward <= once.forward


def test_what_is_kept_does_not_depend_on_chunks():
    """Nor whether it works: in five chunks and more, what A is activated from again must not be gone."""
    grid, wants = Grid(z=2, x=2, y=2), [{}, {"dgrad": False, "wgrad": (False, True)}, {"wgrad": (True, False)}]
    for regather, want in product(REGATHER, wants):
        cut = [block_of(grid, regather=regather, chunks=n) for n in (1, 4, 5, 9)]
        found = [memory(plans, (5040, 8, 16, 8), **want) for plans in cut]
        assert len({(each.kept, each.gradients) for each in found}) == 1, (regather, want, found)


def test_the_closed_form_of_the_planner_keeps_as_much():
    """It counts the input of the block where that is what backward multiplies; here it is an operand that came in."""
    draws = random.Random(0)
    for _ in range(20):
        dp, z, x, y = (draws.choice((1, 2, 4)) for _ in range(4))
        regather = draws.choice(REGATHER)
        tokens, hidden, inner = (64 * draws.randint(1, 4) * 4 for _ in range(3))
        plans, gated = block_of(Grid(dp=dp, z=z, x=x, y=y), regather=regather), draws.random() < 0.5
        activation = "swiglu" if gated else "gelu"
        exact = memory(plans, (tokens, hidden, inner, hidden), dtype=torch.bfloat16, activation=activation).kept
        block, grids = Block.mlp(tokens, hidden, inner, gated), Grids(dp, z, x, y)
        closed = block_cost.memory(block, grids, 2, "adamw", int("a" in regather), int("b" in regather)).activations
        stored = 2 * tokens * hidden // grids.ranks if "a" in regather or y == 1 else 0
        assert exact + stored == closed, (dp, z, x, y, regather, gated)


def test_backends_and_batches():
    grid = Grid(e=2, x=2)
    plan = MatMulPlan(Layout(grid, "e", None, "x"), Layout(grid, "e", "x", None))
    gloo, nccl = (memory(plan, (4, 8, 6, 10), backend=backend) for backend in ("gloo", "nccl"))
    assert gloo.gradients == nccl.gradients == 4 * (4 * 8 * 6 + 4 * 6 * 10) // 4
    for grid, is_more in ((Grid(x=4, y=1, z=1), True), (Grid(x=2, y=2, z=1), False)):
        gloo, nccl = (memory(block_of(grid), (64, 16, 32, 16), backend=name).forward for name in ("gloo", "nccl"))
        assert (gloo > nccl) == is_more, "gloo receives what NCCL adds up on its way; of two ranks, where the sum goes"
    frozen = memory(plan, (4, 8, 6, 10), dgrad=False, wgrad=False)
    assert (frozen.kept, frozen.backward, frozen.gradients) == (0, 0, 0)


def test_what_does_not_fit_is_refused():
    plans = block_of(Grid(z=2, x=2, y=2))
    with pytest.raises(LayoutError, match="takes 4 sizes"):
        memory(plans, (64, 16, 32))
    with pytest.raises(LayoutError, match="does not divide"):
        memory(plans, (64, 18, 32, 18))
    with pytest.raises(ValueError, match="'mpi' is not one of gloo, nccl"):
        memory(plans, (64, 16, 32, 16), backend="mpi")
    one = ndtp.ProcessGrid(Grid(z=1, x=1, y=1))
    with pytest.raises(LayoutError, match="no one schedule"):
        ndtp.nn.MLP(16, 32, dropout=0.5, mesh=one).memory(64)
    assert ndtp.nn.MLP(16, 32, dropout=0.5, mesh=one).eval().memory(64).kept > 0


def test_a_number_of_chunks_that_is_not_chosen_yet():
    plans = block_layouts(Grid(z=2, x=2, y=2), "3d").plans("block", chunks="auto")
    with pytest.raises(LayoutError, match="has not chosen its number of chunks for 64 rows"):
        memory(plans, (64, 16, 32, 16))
    mesh = Mock(chunks_chosen=lambda plan: {64: (2, "as measured")}, wire=None)
    cut = block_layouts(Grid(z=2, x=2, y=2), "3d").plans("block", chunks=2)
    assert memory(plans, (64, 16, 32, 16), mesh=mesh) == memory(cut, (64, 16, 32, 16))
