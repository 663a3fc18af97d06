"""Micro-batches inside `mesh.accumulate()`: gradients are those of the dense model, and one all-reduce sums them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from nn_case import INNER, PARTS, TOKENS, Case

import ndtp
from ndtp import CommMeter, Grid
from ndtp.testing import assert_equal

GRIDS = [(Grid(dp=4, x=1), "1d"), (Grid(dp=2, z=2, x=1, y=2), "3d"), (Grid(dp=2, z=1, x=2, y=1), "3d")]


def reduced_over_dp(meter):
    return sum(t.num_bytes for t in meter.volume.entries if t.collective == "all_reduce" and "dp" in t.axes)


def three_parts(grid, scheme):
    """In chunks over z: gradients go in pieces, but for those that are held back."""
    case = Case(grid, scheme, chunks=grid["z"] if scheme == "3d" else 1)
    with CommMeter() as every:
        for part in case.parts:
            case.run(part)
    case.check(case.parts, "reduced every time")

    with CommMeter() as once:
        for part in case.parts[:-1]:
            with case.mesh.accumulate():
                case.run(part)
            assert all(parameter.grad is None for parameter in case.block.parameters()), "an unfinished gradient"
        inside = reduced_over_dp(once)
        case.run(case.parts[-1])
    for parameter in case.block.parameters():
        torch.testing.assert_close(parameter.grad.norm(), parameter.grad.full_tensor().norm())
    case.check(case.parts, "reduced once")
    assert inside == 0 < reduced_over_dp(once)
    assert PARTS * reduced_over_dp(once) == reduced_over_dp(every)

    with CommMeter() as after:
        case.run(case.parts[0])
    case.check(case.parts[:1], "the step after it")
    assert reduced_over_dp(after) == reduced_over_dp(once), "and it reduces as ever"


@pytest.mark.parametrize("grid,scheme", GRIDS, ids=str)
def test_three_micro_batches_are_reduced_once(ranks, grid, scheme):
    ranks(grid.num_ranks).run(three_parts, grid, scheme)


def otherwise(grid, scheme):
    case = Case(grid, scheme)
    mesh = case.mesh
    with mesh.accumulate():
        case.run(case.parts[0], uses=2)
    case.run(case.parts[1], uses=2)
    case.check(case.parts[:2], "a weight used twice", uses=2)

    with mesh.accumulate():
        for part in case.parts:
            case.run(part)
    mesh.reduce_gradients()
    case.check(case.parts, "no backward follows")

    with mesh.accumulate():
        case.run(case.parts[0])
    x, up = case.parts[1][0], case.block.up
    shape = up.out_layout.shard_shape((TOKENS, INNER))
    up(case.block.in_layout.shard(x, mesh.rank)).backward(torch.zeros(shape, dtype=torch.float64))
    case.check(case.parts[:1], "a backward that does not come to all weights finishes them all")

    with mesh.accumulate():
        case.run(case.parts[0])
    mesh.discard_gradients()
    case.run(case.parts[1])
    case.check(case.parts[1:2], "discarded")


@pytest.mark.parametrize("grid,scheme", [GRIDS[0], (Grid(dp=2, z=2, x=1, y=1), "3d")], ids=str)
def test_weights_used_twice_or_not_at_all_and_no_backward_after_it(ranks, grid, scheme):
    ranks(grid.num_ranks).run(otherwise, grid, scheme)


def exceptions():
    case = Case(*GRIDS[1])

    def fail(_):
        raise ZeroDivisionError("in the middle of backward")

    with pytest.raises(ZeroDivisionError), case.mesh.accumulate():
        case.run(case.parts[0])
        h = case.block.up(case.block.in_layout.shard(case.parts[1][0], case.mesh.rank))
        h.register_hook(fail)
        case.block.down(h).sum().backward()
    assert not case.mesh.step.partial_sums.holds_back
    for part in case.parts[:-1]:
        with case.mesh.accumulate():
            case.run(part)
    case.run(case.parts[-1])
    case.check(case.parts, "the step after an exception")


def test_an_exception_in_between_spoils_nothing(ranks):
    ranks(8).run(exceptions)


def under_autocast():
    """The sum is kept in the parameter's dtype, though products are of another."""
    case = Case(*GRIDS[2])
    block = ndtp.nn.MLP.from_dense(*(layer.float() for layer in case.dense), "relu", mesh=case.mesh)
    gradients = []
    for reduced_once in (False, True):
        block.zero_grad()
        for i, (x, grad) in enumerate(case.parts):
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                y = block(block.in_layout.shard(x.float(), case.mesh.rank))
            grad = block.out_layout.shard(grad, case.mesh.rank).to(y.dtype)
            if reduced_once and i < PARTS - 1:
                with case.mesh.accumulate():
                    y.backward(grad)
            else:
                y.backward(grad)
        gradients.append([layer.weight.grad.to_local() for layer in (block.up, block.down)])
    for every, once in zip(*gradients, strict=True):
        torch.testing.assert_close(once, every, rtol=2e-2, atol=2e-1)


def test_autocast(ranks):
    ranks(4).run(under_autocast)


def computed_weight():
    """A weight that is not a parameter is reduced every time, and its parameter's gradient is right all the same."""
    case = Case(*GRIDS[1])
    plan, mesh = case.block.up.plan, case.mesh
    weight = plan.b.shard(case.dense[0].weight.detach(), mesh.rank).clone().requires_grad_()
    for i, (x, _) in enumerate(case.parts):
        grad = torch.ones(plan.out.shard_shape((TOKENS, INNER)), dtype=torch.float64)
        with mesh.accumulate() if i < PARTS - 1 else contextlib.nullcontext():
            ndtp.matmul(plan.a.shard(x, mesh.rank), 2 * weight, plan, mesh).backward(grad)
    expected = sum(2 * torch.ones(INNER, TOKENS, dtype=torch.float64) @ x for x, _ in case.parts)
    assert_equal(weight.grad, plan.b.shard(expected, mesh.rank), "dB")


def test_a_weight_that_is_computed(ranks):
    ranks(8).run(computed_weight)
