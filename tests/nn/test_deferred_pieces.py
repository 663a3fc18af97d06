"""Pieces of weight gradients that are left to the chain that follows: what they fill, and that nothing loses them."""

from __future__ import annotations

import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import mesh_of
from torch import nn as dense_nn

import ndtp
from ndtp import Grid
from ndtp.collectives.collectives import Collectives
from ndtp.runtime.late_gradients import LateGradients
from ndtp.testing import assert_equal, small_integers

TOKENS, WIDTH, DEPTH, CHUNKS = 32, 8, 4, 4


class Stop(Exception):
    pass


def check(grid, scheme):
    mesh = mesh_of(grid)
    dense = dense_nn.Sequential(*(dense_nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 * DEPTH)))
    with torch.no_grad():
        for i, parameter in enumerate(dense.parameters()):
            parameter.copy_(small_integers(parameter.shape, i, torch.float64, low=-1, high=1))
    blocks = torch.nn.ModuleList(
        ndtp.nn.MLP.from_dense(
            dense[2 * i], dense[2 * i + 1], "identity", mesh=mesh, scheme=scheme, chunks=CHUNKS, name=f"block{i}"
        )
        for i in range(DEPTH)
    )
    whole = small_integers((TOKENS, WIDTH), 9, torch.float64).requires_grad_()
    dense(whole).sum().backward()
    layout = blocks[0].in_layout
    launch, defer = Collectives.launch, LateGradients.defer
    events = []

    def launched(self, route, *tensors):
        time.sleep(random.random() * 2e-3)  # on each rank another time
        events.append((*route.op, route.kind, route.part))
        return launch(self, route, *tensors)

    def deferred(self, rest):
        events.append("defer")
        assert len(self.backward.deferred) < CHUNKS // 2, "more than one product of one chain is held"
        defer(self, lambda: (events.append("rest"), rest()))

    def step(inside=None):
        """Backward; `inside` runs between the last block's and the one before."""
        x = layout.shard(whole.detach(), mesh.rank).requires_grad_()
        y = x
        for i, block in enumerate(blocks):
            y = block(y)
            if i == DEPTH - 2 and inside is not None:
                y.register_hook(inside)
        events.clear()
        with mock.patch.object(Collectives, "launch", launched), mock.patch.object(LateGradients, "defer", deferred):
            y.sum().backward()
        return x

    def is_right(x, times=1):
        assert_equal(x.grad, layout.shard(whole.grad, mesh.rank), "dA")
        for one, other in zip(blocks.parameters(), dense.parameters(), strict=True):
            assert_equal(
                one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad, times * other.grad, ""
            )
        assert not mesh.collectives.in_flight and not mesh.step.late.backward.deferred

    def fresh_step(inside=None):
        blocks.zero_grad()
        return step(inside)

    is_right(fresh_step())
    # Every block leaves a part to the one before it, and the first to the end of backward.
    assert events.count("defer") == events.count("rest") == DEPTH * (1 if scheme == "1d-sp" else CHUNKS // 2)
    if scheme == "1d-sp":  # where the next one waits for its first rows
        done = [i for i, event in enumerate(events) if event == "rest"]
        for i, block in zip(done, reversed(range(DEPTH - 1)), strict=False):
            gather = (f"block{block}.down", "dC", "all_gather")
            assert events[i - 1] == (*gather, "2/4") and events.index((*gather, "3/4")) > i
    orders = [None] * dist.get_world_size()
    dist.all_gather_object(orders, events)
    assert orders[0] == orders[-1], "ranks start their collectives in different orders"

    def stop(grad):
        raise Stop

    with pytest.raises(Stop):
        fresh_step(stop)
    is_right(fresh_step())  # after a backward that was broken off

    def another(grad):
        with torch.enable_grad():
            step()

    is_right(fresh_step(another), times=2)  # another one in between


@pytest.mark.parametrize("grid,scheme", [(Grid(x=2), "1d-sp"), (Grid(z=2, x=1, y=1), "3d")], ids=str)
def test_deferred_pieces_are_exact_and_never_lost(ranks, grid, scheme):
    ranks(2).run(check, grid, scheme)
