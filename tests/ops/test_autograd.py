"""Gradients of the ops as autograd sees them: accumulation, checkpointing, autocast, the loss recipe."""

import dataclasses

import pytest
import torch
from products import (
    BOUNDS,
    SCHEMES,
    scheme_product,
    shards_of,
)
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import CommMeter
from ndtp.testing import assert_equal, small_integers


def accumulate(product):
    plan, mesh, (a_whole, b_whole), a, b = shards_of(product)
    b.requires_grad_()
    a2_whole = small_integers(a_whole.shape, 7, **BOUNDS)
    a2 = plan.a.shard(a2_whole, mesh.rank)
    upstream = small_integers((a_whole.shape[0], b_whole.shape[1]), 8, **BOUNDS)
    g = plan.out.shard(upstream, mesh.rank)
    once = plan.b.shard(a_whole.mT @ upstream, mesh.rank)
    both = plan.b.shard((a_whole + a2_whole).mT @ upstream, mesh.rank)

    y = ndtp.matmul(a, b, plan, mesh) + ndtp.matmul(a2, b, plan, mesh)
    y.backward(g)
    assert_equal(b.grad, both, "a weight used twice")
    ndtp.matmul(a, b, plan, mesh).backward(g)
    assert_equal(b.grad, both + once, "accumulated over two backwards")

    b.grad = None
    c = ndtp.matmul(a, b, plan, mesh)
    c.backward(g, retain_graph=True)
    c.backward(g)
    assert_equal(b.grad, 2 * once, "retain_graph")

    b.grad = None
    (db,) = torch.autograd.grad(ndtp.matmul(a, b, plan, mesh), b, g)
    assert_equal(db, once, "torch.autograd.grad")
    assert b.grad is None, "autograd.grad does not accumulate"

    def block(a, b):
        return ndtp.matmul(a, b, plan, mesh)

    a.requires_grad_()
    checkpoint(block, a, b, use_reentrant=False).backward(g)
    assert_equal(b.grad, once, "checkpoint, dB")
    assert_equal(a.grad, plan.a.shard(upstream @ b_whole.mT, mesh.rank), "checkpoint, dA")

    c = ndtp.matmul(a, b, plan, mesh)
    with torch.no_grad():
        assert not ndtp.matmul(a, b, plan, mesh).requires_grad, "no_grad"
        b.mul_(2)
    try:
        c.backward(g)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
    else:
        raise AssertionError("a weight changed between forward and backward went unnoticed")
    assert not mesh.collectives.in_flight, "handles left over"


def gradient_buffers_are_not_shared(product):
    """Writing into one gradient must change no other tensor that the user holds."""
    plan, mesh, _, a, b = shards_of(product)
    bias = torch.zeros(plan.bias.shard_shape((product.b_shape[1],)), requires_grad=True)
    a.requires_grad_(), b.requires_grad_()
    g = torch.ones(plan.out.shard_shape((product.a_shape[0], product.b_shape[1])))
    before = [t.detach().clone() for t in (a, b, bias, g)]
    ndtp.matmul(a, b, plan, mesh, bias).backward(g)
    gradients = [t.grad.clone() for t in (a, b, bias)]
    for i, tensor in enumerate((a, b, bias)):
        tensor.grad.fill_(99)
        for j, (other, value) in enumerate(zip((a, b, bias), gradients, strict=True)):
            assert j <= i or torch.equal(other.grad, value), f"gradient {j} changed with gradient {i}"
    for tensor, value in zip((a, b, bias, g), before, strict=True):
        assert_equal(tensor, value, "an operand changed with a gradient")


@pytest.mark.parametrize("name", ["1d row", "2d feature split", "3d", "fsdp"])
def test_autograd(ranks, name):
    # The scattered form keeps a gathered B of its own; the check for a weight changed in place wants B saved as it is.
    product = scheme_product(name)
    pool = ranks(product.grid.num_ranks)
    pool.run(gradient_buffers_are_not_shared, product)
    if name in ("1d row", "2d feature split"):
        pool.run(accumulate, product)
    else:
        pool.run(accumulate, dataclasses.replace(product, options={"regather": ("b",)}))


def local_mean_loss(name):
    """The recipe of the docs: a local mean, divided by the number of ranks that split rows."""
    product = scheme_product(name)
    plan, mesh, (a_whole, b_whole), a, b = shards_of(product)
    b.requires_grad_()
    splits = plan.out.num_splits(0) * plan.out.num_splits(1)
    c = ndtp.matmul(a, b, plan, mesh)
    (c.square().mean() / splits).backward()
    weight = b_whole.double().requires_grad_()
    (a_whole.double() @ weight).square().mean().backward()
    torch.testing.assert_close(b.grad.double(), plan.b.shard(weight.grad, mesh.rank), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_loss_recipe(ranks, name):
    ranks(SCHEMES[name][0].num_ranks).run(local_mean_loss, name)


# ---- dtypes ----


def autocast(product):
    plan, mesh, (a_whole, b_whole), a, b = shards_of(product)
    a.requires_grad_(), b.requires_grad_()
    bias = torch.ones(plan.bias.shard_shape((product.b_shape[1],)), requires_grad=True)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16), CommMeter() as meter:
        c = ndtp.matmul(a, b, plan, mesh, bias)
    assert_equal(c, plan.out.shard((a_whole @ b_whole + 1).bfloat16(), mesh.rank), "C")
    forward = plan.volume(global_shape_of(product), "bf16", dgrad=False, wgrad=False)
    assert meter.volume == forward, "cast before they are sent"
    c.float().sum().backward()
    assert (a.grad.dtype, b.grad.dtype, bias.grad.dtype) == (torch.float32,) * 3, "gradients in the operands' dtype"
    ones = torch.ones(product.a_shape[0], product.b_shape[1])
    assert_equal(a.grad, plan.a.shard(ones @ b_whole.mT, mesh.rank), "dA")
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        # As torch does: autocast leaves fp64 alone.
        assert ndtp.matmul(a.double(), b.double(), plan, mesh).dtype == torch.float64, "fp64 under autocast"


def global_shape_of(product):
    return product.a_shape[0], product.a_shape[1], product.b_shape[1]


@pytest.mark.parametrize("name", ["1d row", "2d row split", "3d"])
def test_autocast(ranks, name):
    product = scheme_product(name)
    ranks(product.grid.num_ranks).run(autocast, product)


# ---- errors: the same on every rank, before any collective ----
