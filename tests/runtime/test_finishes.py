"""Biases, activations and sums of parts in one pass, where the grid's GEMM has kernels for that."""

from __future__ import annotations

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import Grid
from ndtp.compute.gemm import KernelGemm
from ndtp.testing import small_integers


class Watched(KernelGemm):
    """Notes what is done in one pass: products, and sums by their number of blocks."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def bound_finish(self, *how):
        run = super().bound_finish(*how)
        return run and (lambda *given: self.seen.append("product") or run(*given))

    def bound_finish_backward(self, *how):
        run = super().bound_finish_backward(*how)
        return run and (lambda *given: self.seen.append("dgrad") or run(*given))

    def finish(self, blocks, *how):
        self.seen.append(f"sum of {blocks.shape[0]}")
        return super().finish(blocks, *how)

    def finish_backward(self, blocks, *how):
        self.seen.append(f"gradient of {blocks.shape[0]}")
        return super().finish_backward(blocks, *how)


def one_pass(scheme, activation, mover, chunks):
    """What is done in one pass on this rank; outputs and gradients equal those of torch's GEMM, which fuses nothing."""
    mesh = mesh_of(Grid(z=1, x=2, y=1))
    if mover == "symmetric":
        mesh = ndtp.ProcessGrid(Grid(z=1, x=2, y=1), collectives="symmetric")
    block = ndtp.nn.MLP(8, 16, activation=activation, mesh=mesh, scheme=scheme, chunks=chunks, seed=0)
    x = block.in_layout.shard(small_integers((16, 8), 3), mesh.rank)
    own, found = mesh.gemm, []
    for gemm in (own, Watched()):
        mesh.gemm = gemm
        try:
            leaf = x.clone().requires_grad_()
            y = block(leaf)
            y.square().sum().backward()
            with torch.no_grad():
                again = block(x)
            torch.testing.assert_close(again, y.detach())
            gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in block.parameters()]
            found.append([y.detach(), leaf.grad, *gradients])
            block.zero_grad()
        finally:
            mesh.gemm = own
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return gemm.seen


SUMS = {"torch": ["sum of 1", "gradient of 1", "sum of 1"], "symmetric": ["sum of 2", "gradient of 2", "sum of 2"]}


def test_what_follows_a_product_is_one_pass_with_it(ranks):
    """Behind a scatter with the sum of its parts, where these come; else in the product's epilogue, gates apart."""
    pool = ranks(2)
    for mover, seen in SUMS.items():
        for activation in ("gelu", "swiglu"):
            assert pool.run(one_pass, "3d", activation, mover, 1) == [seen] * 2, (mover, activation)
    assert pool.run(one_pass, "3d", "gelu", "torch", 2)[0] == [each for each in SUMS["torch"] for _ in range(2)]
    assert pool.run(one_pass, "1d", "gelu", "torch", 1) == [["product", "dgrad", "product"]] * 2
    assert pool.run(one_pass, "1d", "swiglu", "torch", 1)[0] == ["sum of 1", "gradient of 1", "sum of 1"]
    assert pool.run(one_pass, "3d", "quick_gelu", "symmetric", 1) == [["sum of 1", "gradient of 1", "sum of 1"]] * 2


def test_a_gemm_without_such_kernels_fuses_nothing():
    block = ndtp.nn.MLP(8, 16, mesh=ndtp.ProcessGrid(Grid(z=1, x=1, y=1)))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("finish", "finish_backward"):
            patch.setattr(type(block.mesh.gemm), name, None)
        block(torch.ones(4, 8, requires_grad=True)).sum().backward()
