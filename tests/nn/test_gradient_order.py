"""When the reductions of weight gradients run: z's reduce-scatter and then dp's all-reduce, both under products."""

import contextlib
from unittest import mock

import torch
from products import mesh_of
from torch import nn as dense_nn

import ndtp
from ndtp import Grid
from ndtp.testing import assert_equal, small_integers

TOKENS, WIDTH, DEPTH = 32, 16, 3


def second_collectives(accumulated):
    """dp's all-reduce starts a product after z's reduce-scatter, before anything waits for the gradient."""
    mesh = mesh_of(Grid(dp=2, z=2, x=1, y=2))
    dense = dense_nn.Sequential(*(dense_nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 * DEPTH)))
    with torch.no_grad():
        for i, parameter in enumerate(dense.parameters()):
            parameter.copy_(small_integers(parameter.shape, i, torch.float64, low=-1, high=1))
    blocks = [
        ndtp.nn.MLP.from_dense(dense[2 * i], dense[2 * i + 1], "identity", mesh=mesh, name=f"block{i}")
        for i in range(DEPTH)
    ]
    x = small_integers((TOKENS, WIDTH), 9, torch.float64)
    start, started = mesh.collectives.launch, []

    def noted(route, *tensors):
        if route.op[1] == "dB":
            started.append((route.op[0], route.kind))
        return start(route, *tensors)

    for times in range(1 + accumulated):
        with mesh.accumulate() if times < accumulated else contextlib.nullcontext():
            started.clear()
            with mock.patch.object(mesh.collectives, "launch", noted):
                y = blocks[0].in_layout.shard(x, mesh.rank)
                for block in blocks:
                    y = block(y)
                y.sum().backward()
    first, second = "reduce_scatter", "all_reduce"
    order = [("down", first)] + [("down", second)] * (not accumulated) + [("up", first)]
    expected = [(f"block2.{name}", kind) for name, kind in order]
    for block in (1, 0):  # whose first product hides what the one before left
        expected += [(f"block{block + 1}.{name}", second) for name in ["up"] + ["down"] * accumulated]
        expected += [(f"block{block}.{name}", kind) for name, kind in order]
    expected += [(f"block0.{name}", second) for name in ["up"] + ["down"] * accumulated]
    assert started == expected
    dense(x).sum().backward()
    for parameter, expected in zip(torch.nn.ModuleList(blocks).parameters(), dense.parameters(), strict=True):
        assert_equal(parameter.grad.full_tensor(), (1 + accumulated) * expected.grad, "gradient")
    assert not mesh.collectives.in_flight


def test_both_collectives_of_a_weight_gradient_run_under_products(ranks):
    ranks(8).run(second_collectives, 0)


def test_the_all_reduce_that_ends_an_accumulation_runs_under_products(ranks):
    ranks(8).run(second_collectives, 1)


def check_rows_of_each():
    """Ranks of `dp` have numbers of rows of their own, which are cut into other numbers of chunks, or none."""
    mesh = mesh_of(Grid(dp=2, z=2))
    rows = (64, 20)  # of the global tensors, had all ranks as many
    blocks = [
        ndtp.nn.MLP(8, 16, mesh=mesh, scheme="3d", seed=seed, chunks=chunks, dtype=torch.float64)
        for seed, chunks in enumerate((4, 8, 4))
    ]
    whole = torch.randn(sum(rows), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    part = whole.split(rows)[mesh.coordinate["dp"]].chunk(2)[mesh.coordinate["z"]].clone().requires_grad_()
    x = part
    for block in blocks:
        x = x + block(x)
    x.square().sum().backward()
    dense = [block.to_dense() for block in blocks]
    given = whole.clone().requires_grad_()
    x = given
    for block in dense:
        x = x + block(x)
    x.square().sum().backward()
    for block, theirs in zip(blocks, dense, strict=True):
        for ours, expected in zip(block.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)


def test_ranks_of_dp_may_have_other_numbers_of_rows(ranks):
    ranks(4).run(check_rows_of_each)
