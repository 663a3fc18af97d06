"""Whatever a program does for a long time: threads, descriptors, handles, loans and grids stay as many as they were."""

import gc
import os
import sys
import weakref

import pytest
import torch

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.collectives.direct_exchange import past_of

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(sys.platform != "linux", reason="looks for threads in /proc")]


class Fails(torch.nn.Module):
    """An activation that raises when it is told to."""

    def __init__(self):
        super().__init__()
        self.when = None

    def forward(self, x):
        if self.when == "forward":
            raise LookupError("on purpose")
        if self.when == "backward" and x.requires_grad:
            x.register_hook(self.fail)
        return torch.relu(x)

    def fail(self, gradient):
        raise LookupError("on purpose")


def held(mesh):
    """What may grow.  `waiting_bytes` of a ring does not: it is bounded by its limit."""
    ring = mesh.ring
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "in flight": mesh.collectives.in_flight,
        "lent": ring.lent_bytes,
        "kept": ring.lent_bytes + ring.waiting_bytes > ring.limit_bytes,
        "given up": sum(len(past_of(mesh.group((axis,))).given_up) for axis in mesh.mesh_axes),
    }


def step(layers, mesh, when=None):
    first, activation, second = layers
    activation.when = when
    # Larger than what a ring leaves to the allocator, and not along dim 0.
    x = torch.ones(first.in_layout.shard_shape((256, 256)), requires_grad=True)
    second(activation(first(x))).sum().backward()


def long_training(steps):
    mesh = ProcessGrid(Grid(x=2), ring_bytes=2**20)
    layouts = {"in_layout": ndtp.Layout(mesh.grid, None, "x"), "weight_layout": ndtp.Layout(mesh.grid, None, "x")}
    first = ndtp.nn.Linear(256, 256, mesh=mesh, out_layout=ndtp.Layout(mesh.grid, None, "x"), **layouts)
    second = ndtp.nn.Linear(256, 256, mesh=mesh, out_layout=ndtp.Layout(mesh.grid, "x", None), **layouts)
    layers = (first, Fails(), second)
    for _ in range(3):
        step(layers, mesh)
    gc.collect()
    gc.disable()  # nothing may wait for it
    before = held(mesh)
    for i in range(steps):
        when = {3: "forward", 7: "backward"}.get(i % 10)
        try:
            step(layers, mesh, when)
        except LookupError:
            assert when
        else:
            assert not when
    step(layers, mesh)  # finishes what the last failure gave up
    after = held(mesh)
    gc.enable()
    return before, after


def test_a_long_training_with_exceptions_holds_no_more_than_a_short_one(ranks):
    for before, after in ranks(2).run(long_training, 100):
        assert before == after


def many_grids(number):
    gone = []
    for i in range(number + 3):
        if i == 3:
            gc.collect()
            gc.disable()
            before = held(ProcessGrid(Grid(x=2)))
        mesh = ProcessGrid(Grid(x=2), timeout=60 if i % 10 == 0 else None)
        layer = ndtp.nn.Linear(8, 8, mesh=mesh, scheme="2d", chunks=1 + i % 2)
        layer(torch.ones(layer.in_layout.shard_shape((8, 8)), requires_grad=True)).sum().backward()
        gone.append(weakref.ref(mesh))
        del mesh, layer
    gc.enable()
    assert not any(grid() for grid in gone[3:]), "grids wait for the garbage collector"
    return before, held(ProcessGrid(Grid(x=2)))


def test_fifty_grids_leave_nothing(ranks):
    for before, after in ranks(2).run(many_grids, 50):
        assert before == after
