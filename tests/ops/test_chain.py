"""A block as one schedule: products, activation and gradients are those of the dense block, whatever the chunks."""

from __future__ import annotations

import random
import time
from itertools import product
from unittest import mock

import pytest
import torch
from products import BOUNDS, mesh_of

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.algebra.schemes import block_layouts
from ndtp.compute import gemm
from ndtp.ops.products import mlp
from ndtp.testing import assert_equal, small_integers

ROWS, HIDDEN, INNER = 96, 16, 32
SIZES = (ROWS, HIDDEN, INNER)
CASES = [
    (Grid(z=2, x=2, y=2), "3d"),
    (Grid(z=1, x=2, y=4), "3d"),
    (Grid(z=2, x=1, y=4), "3d"),
    (Grid(z=2, x=4, y=1), "3d"),
    (Grid(z=4, x=1, y=1), "3d"),
    (Grid(x=2, y=2), "2d"),
    (Grid(x=2, y=4), "2d-features"),
    (Grid(x=4), "1d-sp"),
    (Grid(x=4), "1d"),
]


def whole_tensors(dtype):
    shapes = ((ROWS, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (INNER,), (HIDDEN,), (ROWS, HIDDEN))
    return [small_integers(shape, i, dtype, **BOUNDS) for i, shape in enumerate(shapes)]


def dense_block(dtype):
    """The result and the gradients of x, the weights and the biases."""
    x, up, down, up_bias, down_bias, grad = whole_tensors(dtype)
    leaves = [t.requires_grad_() for t in (x, up, down, up_bias, down_bias)]
    y = torch.relu(x @ up.mT + up_bias) @ down.mT + down_bias
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def shards_on(mesh, plans, dtype):
    layouts = (plans[0].a, plans[0].b, plans[1].b, plans[0].bias, plans[1].bias, plans[1].out)
    shards = [layout.shard(t, mesh.rank).clone() for layout, t in zip(layouts, whole_tensors(dtype), strict=True)]
    return layouts, shards


def check_block(grid, scheme, dtype, delays=False, **options):
    mesh = mesh_of(grid)
    plans = block_layouts(grid, scheme).plans("block", **options)
    layouts, (x, up, down, up_bias, down_bias, grad) = shards_on(mesh, plans, dtype)
    leaves = [t.requires_grad_() for t in (x, up, down, up_bias, down_bias)]
    start = mesh.collectives.launch
    draws = random.Random(mesh.rank)

    def late(*arguments, **how):
        time.sleep(draws.choice((0.0, 0.0, 0.003)))
        return start(*arguments, **how)

    mesh.collectives.launch = late if delays else start
    try:
        with CommMeter() as meter:
            y = mlp(x, (up, down), plans, mesh, "relu", (up_bias, down_bias))
            gradients = torch.autograd.grad(y, leaves, grad)
    finally:
        mesh.collectives.launch = start
    names = ("C", "dA", "dB", "dB'", "dbias", "dbias'")
    for name, layout, mine, dense in zip(
        names, (layouts[-1], *layouts[:-1]), (y, *gradients), dense_block(dtype), strict=True
    ):
        assert_equal(mine, layout.shard(dense, mesh.rank), f"{scheme} {grid} {options}: {name}")
    shapes = ((ROWS, HIDDEN, INNER), (ROWS, INNER, HIDDEN))
    predicted = sum(
        (plan.volume(shape, dtype, bias=True) for plan, shape in zip(plans[1:], shapes[1:], strict=True)),
        plans[0].volume(shapes[0], dtype, bias=True),
    )
    assert meter.volume == predicted, f"{scheme} {grid} {options}"
    assert not mesh.collectives.in_flight


def many_blocks(grid, scheme):
    """Each number of chunks with each choice of what is gathered again, on every other grid."""
    turn = CASES.index((grid, scheme))
    for (i, chunks), (j, regather) in product(enumerate((1, 2, 3)), enumerate(((), ("a",), ("b",), ("a", "b")))):
        if (i + j + turn) % 2 == 0:
            check_block(grid, scheme, torch.float32, chunks=chunks, regather=regather)
    check_block(grid, scheme, torch.float64, delays=True, chunks=4)
    check_block(grid, scheme, torch.bfloat16, chunks=2)


@pytest.mark.parametrize("grid,scheme", CASES, ids=str)
def test_block_equals_dense_to_the_bit_and_to_the_byte(ranks, grid, scheme):
    ranks(grid.num_ranks).run(many_blocks, grid, scheme)


def low_precision_is_joined_when_it_arrives(grid, scheme):
    """A sum over K is one product in low precision; its operand is put in order once, not for every chunk."""
    with mock.patch.object(gemm, "joined", side_effect=AssertionError("joined at its product")):
        check_block(grid, scheme, torch.bfloat16, chunks=2)


def test_low_precision_is_joined_once(ranks):
    ranks(8).run(low_precision_is_joined_when_it_arrives, Grid(z=2, x=2, y=2), "3d")
    ranks(8).run(low_precision_is_joined_when_it_arrives, Grid(x=2, y=4), "2d-features")


def partial_gradients(grid, scheme, first):
    """Every other subset of gradients that may be wanted, each of them on one of two grids, as bits are set."""
    mesh = mesh_of(grid)
    plans = block_layouts(grid, scheme).plans("block", chunks=2)
    layouts, (*leaves, grad) = shards_on(mesh, plans, torch.float64)
    _, *dense = dense_block(torch.float64)
    for wanted in (bits for bits in range(1, 32) if bits.bit_count() % 2 == first):
        mine = [t.detach().clone().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(leaves)]
        y = mlp(mine[0], mine[1:3], plans, mesh, "relu", mine[3:])
        y.backward(grad)
        for leaf, layout, gradient in zip(mine, layouts, dense, strict=False):
            if leaf.requires_grad:
                assert_equal(leaf.grad, layout.shard(gradient, mesh.rank), f"wanted {wanted:05b}")
            else:
                assert leaf.grad is None
    assert not mesh.collectives.in_flight


def test_any_part_of_the_gradients(ranks):
    ranks(8).run(partial_gradients, Grid(z=2, x=2, y=2), "3d", 0)
    ranks(4).run(partial_gradients, Grid(x=2, y=2), "2d-features", 1)
    ranks(4).run(partial_gradients, Grid(z=2, x=1, y=2), "3d", 1)


def rejected():
    mesh = mesh_of(Grid(x=2, y=2, z=2))
    up, down = block_layouts(mesh.grid, "3d").plans("block")
    x, weight = torch.zeros(4, 4), torch.zeros(4, 4)
    for arguments, fragment in (
        (((weight, weight), (up, up), mesh, "relu"), "leaves its result as"),
        (((weight,), (up, down), mesh, "relu"), "1 weights, 2 plans"),
        (((weight, weight), (up, down), mesh, "swish"), "is not one of gelu"),
    ):
        with pytest.raises(ValueError, match=fragment):
            mlp(x, *arguments)
    with pytest.raises(LayoutError):
        mlp(torch.zeros(3, 4), (weight, weight), (up, down), mesh, "relu")


def test_what_does_not_fit_is_refused(ranks):
    ranks(8).run(rejected)


def module_is_one_schedule():
    """The module's second gather starts before its first product is done; with dropout it is two products."""
    mesh = mesh_of(Grid(z=2, x=2, y=2))
    events = []
    block = ndtp.nn.MLP(HIDDEN, INNER, mesh=mesh, chunks=3, dropout=0.5)
    x = torch.randn(block.in_layout.shard_shape((ROWS, HIDDEN)))
    start = mesh.collectives.launch

    def noted(route, *tensors):
        events.append((route.op, route.part))
        return start(route, *tensors)

    mesh.collectives.launch = noted
    try:
        for training in (False, True):
            events.clear()
            block.train(training)
            block(x)
            entered = events.index((("mlp.down", "A"), "1/3"))
            left = events.index((("mlp.up", "C"), "3/3"))
            assert (entered < left) != training, events
    finally:
        mesh.collectives.launch = start


def test_a_module_runs_as_one_schedule(ranks):
    ranks(8).run(module_is_one_schedule)
