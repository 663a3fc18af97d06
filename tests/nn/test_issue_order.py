"""The order in which a rank starts collectives depends on its calls of ndtp alone."""

from __future__ import annotations

import contextlib
import gc
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import mesh_of
from torch import nn as dense_nn

import ndtp
from ndtp import Grid
from ndtp.collectives.collectives import Collectives
from ndtp.testing import assert_equal, small_integers

TOKENS, WIDTH, DEPTH = 16, 8, 3
GRIDS = [Grid(dp=2, z=2, x=1, y=1), Grid(z=2, x=1, y=2)]


def integers(shape, seed):
    return small_integers(shape, seed, torch.float64, low=-1, high=1)


def dense_stack():
    layers = [dense_nn.Linear(WIDTH, WIDTH).double() for _ in range(2 * DEPTH)]
    with torch.no_grad():
        for i, parameter in enumerate(p for layer in layers for p in layer.parameters()):
            parameter.copy_(integers(tuple(parameter.shape), i))
    return layers


def dense_model(layers):
    pairs = zip(layers[::2], layers[1::2], strict=True)
    return dense_nn.Sequential(*(m for up, down in pairs for m in (up, dense_nn.ReLU(), down)))


def stack_on(meshes, layers):
    """The blocks lie on the meshes in turns."""
    pairs = enumerate(zip(layers[::2], layers[1::2], strict=True))
    meshes = [meshes[i % len(meshes)] for i in range(DEPTH)]
    return [ndtp.nn.MLP.from_dense(*pair, "relu", mesh=meshes[i], name=f"block{i}") for i, pair in pairs]


def whole(x, layout, mesh):
    return ndtp.relayout(x, layout, ndtp.Layout(mesh.grid, None, None), mesh)


def apply(block, x):
    """A block on whole activations."""
    shard = ndtp.relayout(x, ndtp.Layout(block.mesh.grid, None, None), block.in_layout, block.mesh)
    return whole(block(shard), block.out_layout, block.mesh)


@contextlib.contextmanager
def issued():
    """What the collectives are for that this rank starts, in order."""
    launch, order = Collectives.launch, []

    def noted(self, route, *tensors):
        order.append((self.groups.grid, route.op, route.phase, route.kind, route.axes, route.part))
        return launch(self, route, *tensors)

    with mock.patch.object(Collectives, "launch", noted):
        yield order


def assert_same_on_every_rank(order, what):
    orders = [None] * dist.get_world_size()
    dist.all_gather_object(orders, order)
    for rank, other in enumerate(orders):
        assert other == orders[0], f"{what}: rank {rank} starts {other}, rank 0 {orders[0]}"


class SideGraph:
    """Operations of autograd, hooks and collections that are this rank's own, beside a model."""

    def __init__(self, seed, rank):
        self.random = random.Random(1000 * seed + rank)
        self.seen = []

    def around(self, x):
        """The same values by a detour."""
        for _ in range(self.random.randrange(4)):
            x = self.random.choice([lambda x: x * 1, lambda x: x + 0, lambda x: x.clone(), lambda x: x.T.T])(x)
        if x.requires_grad and self.random.random() < 0.4:
            x.register_hook(lambda grad: self.collect() or self.seen.append(grad.sum().item()))
        return x

    def branches(self):
        """Values that are zero, with graphs that are older than the model's."""
        own = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(self.random.randrange(4))]
        return [0 * self.around(self.around(x * x)).sum() for x in own]

    def loss(self, tensors, branches):
        """Terms that are zero."""
        aux = sum(branches, torch.zeros((), dtype=torch.float64))
        for tensor in self.random.sample(tensors, self.random.randrange(len(tensors) + 1)):
            aux = aux + 0 * self.around(tensor).sum()
        return sum(self.branches(), aux)

    def collect(self):
        if self.random.random() < 0.3:
            gc.collect(1)


def random_side_graphs(grids, seeds):
    """Every rank has operations of its own: gradients are dense ones, and every rank starts the same collectives."""
    meshes, layers = [mesh_of(grid) for grid in grids], dense_stack()
    blocks = stack_on(meshes, layers)
    parameters = [p for block in blocks for p in block.parameters()]
    parts = [integers((TOKENS, WIDTH), 90 + i) for i in range(2)]
    dense = dense_model(layers)
    for x in parts:
        dense(x).sum().backward()
    for seed in seeds:
        side = SideGraph(seed, meshes[0].rank)
        with issued() as order:
            for i, x in enumerate(parts):
                with contextlib.ExitStack() as held:
                    for mesh in meshes if i == 0 and seed % 2 else ():
                        held.enter_context(mesh.accumulate())
                    y, between, branches = x, [], side.branches()
                    for block in blocks:
                        y = side.around(apply(block, side.around(y)))
                        between.append(y)
                        side.collect()
                    (y.sum() + side.loss(between, branches)).backward()
        assert_same_on_every_rank(order, f"seed {seed}")
        for parameter, expected in zip(parameters, dense.parameters(), strict=True):
            assert_equal(parameter.grad.full_tensor(), expected.grad, f"seed {seed}")
            parameter.grad = None
        assert not any(mesh.collectives.in_flight for mesh in meshes)


@pytest.mark.parametrize("grids", [GRIDS[:1], GRIDS[1:], [GRIDS[0], Grid(dp=2, z=1, x=1, y=2)]], ids=str)
def test_what_else_is_in_a_ranks_graph_changes_no_collective(ranks, grids):
    ranks(4).run(random_side_graphs, grids, range(4))


def one_rank_leaves_backward(mesh_grid):
    """An exception behind the last product, on one rank alone: the ranks are as one again in the next step."""
    mesh = mesh_of(mesh_grid)
    layers = dense_stack()
    blocks = stack_on([mesh], layers)
    x = blocks[0].in_layout.shard(integers((TOKENS, WIDTH), 9), mesh.rank).requires_grad_()

    def forward():
        y = x * 1
        if mesh.rank == 1 and forward.fails:
            y.register_hook(lambda _: 1 / 0)
        for block in blocks:
            y = block(y)
        return y.sum()

    with issued() as order:
        for fails in (True, False):
            forward.fails = fails
            for block in blocks:
                block.zero_grad()
            try:
                forward().backward()
            except ZeroDivisionError:
                assert fails
    assert_same_on_every_rank(order, "after an exception")
    dense = dense_model(layers)
    dense(integers((TOKENS, WIDTH), 9)).sum().backward()
    for parameter, expected in zip((p for b in blocks for p in b.parameters()), dense.parameters(), strict=True):
        assert_equal(parameter.grad.full_tensor(), expected.grad, "the step after it")


def test_an_exception_on_one_rank_behind_the_products_leaves_the_ranks_in_step(ranks):
    ranks(4).run(one_rank_leaves_backward, GRIDS[0])


def garbage():
    """A model in a reference cycle is collected at another time on every rank; its weights decide nothing."""
    mesh = ndtp.ProcessGrid(GRIDS[1])
    layers = dense_stack()
    first, *others = stack_on([mesh], layers)
    x = first.in_layout.shard(integers((TOKENS, WIDTH), 9), mesh.rank)

    def passes(block):
        with torch.no_grad():
            return block(x)

    expected = passes(first)
    for seed, other in enumerate(others):
        gc.disable()
        with issued() as order:
            for _ in range(2):  # learn the order
                passes(first), passes(other)
            other.cycle = [other]
            first.zero_grad()
            y = other(first(x))  # a graph in a cycle, whose gradients never arrive
            y.cycle = y
            y.grad_fn.metadata["cycle"] = y
            torch.autograd.grad(y.sum(), [first.up.bias], retain_graph=True)
            del other, y
            others[seed] = None
            if mesh.rank % 2:
                gc.collect()
            assert_equal(passes(first), expected, "after a collection on some ranks")
            assert_equal(passes(first), expected, "and again")
            first(x).sum().backward()
        gc.enable(), gc.collect()
        assert_same_on_every_rank(order, "garbage")


def test_the_garbage_collector_changes_no_collective(ranks):
    ranks(4).run(garbage)


def grids_in_cycles():
    """Ranks make process groups together, whether or not one of them has collected the last grid that had them."""
    gc.disable()
    grid = Grid(x=4, y=1)
    mesh = ndtp.ProcessGrid(grid)
    cycle = [mesh]
    cycle.append(cycle)
    del mesh, cycle
    if dist.get_rank() % 2:
        gc.collect()
    mesh = ndtp.ProcessGrid(grid)
    gc.enable()
    layout = ndtp.Layout(grid, "x")
    assert_equal(ndtp.relayout(torch.ones(1), layout, ndtp.Layout(grid, None), mesh), torch.ones(4), "a new grid")


def test_the_garbage_collector_makes_no_process_group(ranks):
    ranks(4).run(grids_in_cycles)
