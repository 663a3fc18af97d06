"""`mesh.interleave`: parts of a batch in turns give the gradients of the whole, and move what micro-batches would."""

from __future__ import annotations

import torch
from nn_case import HIDDEN, INNER, PARTS, TOKENS, Case, dense_block, integers
from test_issue_order import assert_same_on_every_rank, issued

import ndtp
from ndtp import CommMeter, Grid
from ndtp.collectives.turns import TURN
from ndtp.testing import assert_equal

GRIDS = [
    (Grid(x=4), "1d-sp", 1, 2),
    (Grid(z=2, x=1, y=2), "3d", 2, 2),
    (Grid(dp=2, z=2, x=1, y=1), "3d", 1, 2),
    (Grid(dp=2, x=2), "1d", 2, 3),
]
DEPTH = 3


class Stack(Case):
    """Several blocks."""

    def __init__(self, grid, scheme, chunks):
        super().__init__(grid, scheme, chunks)
        self.blocks = torch.nn.ModuleList([self.block])
        for i in range(1, DEPTH):
            more = ndtp.nn.MLP.from_dense(*self.dense, "relu", mesh=self.mesh, scheme=scheme, chunks=chunks)
            self.blocks.append(more)

    def loss(self, part, uses=1):
        x, grad = (self.block.in_layout.shard(each, self.mesh.rank) for each in part)
        for block in self.blocks:
            x = x + (block(x) - 1).clamp(-1, 1)
        return (x * grad).sum()


def gradients(model):
    found = [parameter.grad.to_local() for parameter in model.parameters()]
    model.zero_grad()
    return found


def as_micro_batches(grid, scheme, chunks, count):
    stack = Stack(grid, scheme, chunks)
    mesh, parts = stack.mesh, stack.parts[:count]
    for _ in range(2):
        with CommMeter() as expected:
            for part in parts[:-1]:
                with mesh.accumulate():
                    stack.run(part)
            stack.run(parts[-1])
        wanted = gradients(stack.blocks)

    def step(part):
        stack.run(part)
        return TURN.get().number

    for _ in range(2):
        with CommMeter() as meter, issued() as order:
            numbers = mesh.interleave(step, parts)
        assert numbers == list(range(count)) and TURN.get() is None
        for own, other in zip(gradients(stack.blocks), wanted, strict=True):
            assert_equal(own, other, "in turns")
        assert sum(mine != after for mine, after in zip(order, order[1:])) > 0
        assert meter.volume == expected.volume, f"{grid} {meter.volume} {expected.volume}"
        assert_same_on_every_rank([str(each) for each in order], "in turns")
        assert not mesh.collectives.in_flight


def every_grid():
    for case in GRIDS:
        as_micro_batches(*case)


def test_in_turns_as_micro_batches(ranks):
    ranks(4).run(every_grid)
