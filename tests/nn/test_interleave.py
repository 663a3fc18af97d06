"""`mesh.interleave`: parts of a batch in turns give the gradients of the whole, and move what micro-batches would."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time

import pytest
import torch
from nn_case import HIDDEN, INNER, Case
from products import mesh_of
from test_issue_order import assert_same_on_every_rank, issued
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import CommMeter, Grid
from ndtp.collectives.turns import TURN
from ndtp.errors import GridError, LayoutError
from ndtp.testing import assert_equal

GRIDS = [
    (Grid(dp=2, z=2, x=1, y=1), "3d", 1, 2),
    (Grid(dp=2, x=2), "1d", 2, 3),
]
DEPTH = 3


class Stack(Case):
    """Several blocks."""

    def __init__(self, grid, scheme, chunks=1):
        super().__init__(grid, scheme, chunks)
        like = {"mesh": self.mesh, "scheme": scheme, "chunks": chunks}
        more = [ndtp.nn.MLP.from_dense(*self.dense, "relu", **like) for _ in range(1, DEPTH)]
        self.blocks = torch.nn.ModuleList([self.block, *more])
        self.came: list[int] = []  # the parts, block by block

    def loss(self, part, uses=1):
        x, grad = (self.block.in_layout.shard(each, self.mesh.rank) for each in part)
        for block in self.blocks:
            if TURN.get() is not None:
                self.came.append(TURN.get().number)
                time.sleep(2e-3 * random.random())  # ranks are late at other points: nothing may go by that
            x = x + (block(x) - 1).clamp(-1, 1)
        return (x * grad).sum()

    def gradients(self):
        found = [parameter.grad.to_local() for parameter in self.blocks.parameters()]
        self.blocks.zero_grad()
        return found

    def one_after_the_other(self, parts):
        with CommMeter() as meter:
            for part in parts[:-1]:
                with self.mesh.accumulate():
                    self.run(part)
            self.run(parts[-1])
        return self.gradients(), meter.volume

    def in_turns(self, parts, what):
        """What collectives were for, in the order in which they were started."""
        wanted, volume = self.one_after_the_other(parts)
        self.came.clear()
        with CommMeter() as meter, issued() as order:
            threads = self.mesh.interleave(lambda part: [self.run(part), threading.get_ident()][1], parts)
        assert len(set(threads)) == len(parts), what
        assert self.came == [*range(len(parts))] * DEPTH, f"{what}: each goes on while the others wait"
        for own, other in zip(self.gradients(), wanted, strict=True):
            assert_equal(own, other, what)
        assert meter.volume == volume, what
        assert not self.mesh.collectives.in_flight, what
        assert not self.mesh.step.partial_sums, what
        return order


def as_micro_batches():
    for grid, scheme, chunks, count in GRIDS:
        stack = Stack(grid, scheme, chunks)
        for what in (f"first {grid}", f"with weights gathered ahead {grid}"):
            assert_same_on_every_rank(stack.in_turns(stack.parts[:count], what), what)
        with stack.mesh.accumulate():
            stack.mesh.interleave(stack.run, stack.parts[:2])
        stack.run(stack.parts[2])
        for own, other in zip(stack.gradients(), stack.one_after_the_other(stack.parts)[0], strict=True):
            assert_equal(own, other, "and then another micro-batch")


def test_in_turns_as_micro_batches(ranks):
    ranks(4).run(as_micro_batches)


def half_way(part, stack, fail):
    """A step that fails in the backward of one part, or runs."""
    x, grad = (stack.block.in_layout.shard(each, stack.mesh.rank) for each in part)
    h = stack.blocks[0](x)
    if fail is not None and part is stack.parts[1]:
        h.register_hook(fail)
    (stack.blocks[1](h) * grad).sum().backward()


def divide(_):
    raise ZeroDivisionError("in the middle of backward")


def interrupt(_):
    raise KeyboardInterrupt


def exceptions():
    gc.disable()  # what was on its way goes with the exception, and waits for no collector
    try:
        every_exception()
    finally:
        gc.enable()


def every_exception():
    stack = Stack(Grid(z=2, x=1, y=1), "3d")
    mesh, parts = stack.mesh, stack.parts

    def refused(part):
        if part is parts[0]:
            stack.run(part)
        else:
            stack.run((part[0][:, :3], part[1]))

    for step, error in (
        (lambda part: half_way(part, stack, divide), ZeroDivisionError),
        (lambda part: half_way(part, stack, interrupt), KeyboardInterrupt),
        (refused, LayoutError),
        (lambda part: mesh.interleave(stack.run, [part]), GridError),
    ):
        with pytest.raises(error):
            mesh.interleave(step, parts)
        stack.blocks.zero_grad()
        stack.in_turns(parts, f"after {error}")
    with pytest.raises(GridError, match="no parts"):
        mesh.interleave(stack.run)
    with pytest.raises(ValueError, match="argument 2"):
        mesh.interleave(stack.run, parts, parts[:1])
    interrupted(stack)
    stack.in_turns(parts, "after Ctrl-C")


def interrupted(stack):
    """While another part runs, all ranks at the same point."""

    def step(part):
        if part is stack.parts[1] and stack.mesh.rank == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # which gets it at once
            time.sleep(0.1)
        elif part is stack.parts[1]:
            signal.raise_signal(signal.SIGINT)  # which the main thread gets when its turn has come
        stack.run(part)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            stack.mesh.interleave(step, stack.parts)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.active_count() == 1 or all(not t.name.startswith("part ") for t in threading.enumerate())
    stack.blocks.zero_grad()


def test_an_exception_in_one_part_ends_all(ranks):
    ranks(2).run(exceptions)


def states():
    """Of the thread that calls, in each part; and random numbers that the grid has no part in."""
    found = []
    for grid in (Grid(x=2), Grid(x=1)):
        mesh = mesh_of(grid) if grid.num_ranks > 1 else ndtp.ProcessGrid(grid)
        block = ndtp.nn.MLP(HIDDEN, INNER, mesh=mesh, scheme="1d", dropout=0.5, seed=0)
        x = torch.ones(6, HIDDEN)

        def step(x, block=block):
            y = checkpoint(block, x, use_reentrant=False)
            assert y.dtype == torch.bfloat16 and torch.get_default_device().type == "cpu"
            y.float().square().sum().backward()
            return y, torch.rand(1)

        torch.manual_seed(5)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16), torch.device("cpu"):
            y = mesh.interleave(step, x.chunk(3))
        found.append((y, block.up.weight.grad.full_tensor() if grid.num_ranks > 1 else block.up.weight.grad))
        with torch.no_grad():
            assert not any(y.requires_grad for y in mesh.interleave(lambda x, block=block: block(x), x.chunk(3)))
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.05)
    (first, a), (second, b), _ = found[0][0]
    assert a != b and not torch.equal(first, second)


def test_the_state_of_the_thread_is_carried_over(ranks):
    ranks(2).run(states)
