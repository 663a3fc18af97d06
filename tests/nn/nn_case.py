"""A block on a grid, the same block dense, and micro-batches for both, whose gradients are integers."""

from __future__ import annotations

import torch
from products import mesh_of

import ndtp
from ndtp.testing import assert_equal, small_integers

TOKENS, HIDDEN, INNER = 32, 8, 16
PARTS = 3


def integers(shape, seed):
    return small_integers(shape, seed, torch.float64, low=-1, high=1)


def dense_block():
    up, down = torch.nn.Linear(HIDDEN, INNER).double(), torch.nn.Linear(INNER, HIDDEN).double()
    with torch.no_grad():
        for i, parameter in enumerate((*up.parameters(), *down.parameters())):
            parameter.copy_(integers(tuple(parameter.shape), i))
    return up, down


class Case:
    """A block on a grid, the same block dense, and micro-batches for both."""

    def __init__(self, grid, scheme, chunks=1):
        self.mesh = mesh_of(grid)
        self.dense = dense_block()
        self.block = ndtp.nn.MLP.from_dense(*self.dense, "relu", mesh=self.mesh, scheme=scheme, chunks=chunks)
        self.parts = [(integers((TOKENS, HIDDEN), 10 + i), integers((TOKENS, HIDDEN), 20 + i)) for i in range(PARTS)]
        self.volume = self.block.volume(TOKENS, dgrad=False)

    def loss(self, part, uses=1):
        """A micro-batch on the grid; the block is used so often in it."""
        x, grad = part
        x = self.block.in_layout.shard(x, self.mesh.rank)
        y = sum(self.block(x) for _ in range(uses))
        return (y * self.block.out_layout.shard(grad, self.mesh.rank)).sum()

    def run(self, part, uses=1):
        self.loss(part, uses).backward()

    def expected(self, parts, uses=1):
        """The dense gradients of the sum over micro-batches."""
        up, down = self.dense
        for parameter in (*up.parameters(), *down.parameters()):
            parameter.grad = None
        for x, grad in parts:
            (uses * down(torch.relu(up(x)))).backward(grad)
        return [parameter.grad for parameter in (*up.parameters(), *down.parameters())]

    def check(self, parts, what, uses=1):
        up, down = self.block.up, self.block.down
        layouts = (up.plan.b, up.plan.bias, down.plan.b, down.plan.bias)
        for parameter, layout, dense in zip(self.block.parameters(), layouts, self.expected(parts, uses), strict=True):
            assert_equal(parameter.grad.to_local(), layout.shard(dense, self.mesh.rank), what)
        assert not self.mesh.collectives.in_flight, what
        self.block.zero_grad()
