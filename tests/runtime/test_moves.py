"""What tensors are copied on their way."""

from __future__ import annotations

import torch
from products import mesh_of
from torch.utils._python_dispatch import TorchDispatchMode

import ndtp
from ndtp import CommMeter, Grid, Layout, MatMulPlan
from ndtp.testing import assert_equal, small_integers


class Copies(TorchDispatchMode):
    """Notes how many elements of a dtype each copy has."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.sizes = dtype, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op.overloadpacket.__name__ in ("copy_", "clone", "cat", "_to_copy") and result.dtype is self.dtype:
            self.sizes.append(result.numel())
        return result


def weights_by_columns(grid, chunks, regather):
    """The columns of a weight are gathered, and those of its gradient scattered, as `nn.Linear` stores them."""
    mesh, dtype, inner = mesh_of(grid), torch.bfloat16, 256
    rows, columns = Layout.parse(grid, "(z y) x"), Layout.parse(grid, "y (x z)")
    plan = MatMulPlan(rows, columns, transpose_b=True, chunks=chunks, regather=regather)
    shapes = (16, 16), (inner, 16), (16, inner)
    dense = [small_integers(shape, seed, dtype, low=-1, high=1) for seed, shape in enumerate(shapes)]
    a = plan.a.shard(dense[0], mesh.rank).clone().requires_grad_()
    b = plan.b.shard(dense[1], mesh.rank).clone().requires_grad_()
    with CommMeter() as meter, Copies(dtype) as copies:
        c = ndtp.matmul(a, b, plan, mesh)
        c.backward(plan.out.shard(dense[2], mesh.rank))
    assert meter.volume == plan.volume((16, 16, inner), dtype)
    assert_equal(c, plan.out.shard(dense[0] @ dense[1].mT, mesh.rank), "C")
    assert_equal(a.grad, plan.a.shard(dense[2] @ dense[1], mesh.rank), "dA")
    assert_equal(b.grad, plan.b.shard(dense[2].mT @ dense[0], mesh.rank), "dB")
    assert b.grad.is_contiguous()
    assert max(copies.sizes) <= max(b.numel(), a.numel(), c.numel()) < b.numel() * grid["z"], copies.sizes


def every_way_of_weights_by_columns():
    for chunks, regather in ((1, ()), (4, ("a", "b")), (2, ("b",))):
        weights_by_columns(Grid(z=2, x=1, y=1), chunks, regather)


def test_no_gathered_weight_is_copied_where_products_take_no_blocks(ranks):
    ranks(2).run(every_way_of_weights_by_columns)


def test_no_gathered_weight_is_copied_on_three_axes(ranks):
    ranks(8).run(weights_by_columns, Grid(z=2, x=2, y=2), 2, ())
