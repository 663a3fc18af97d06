"""Weights that change between uses: a forward multiplies by what they are now, a backward refuses what has changed."""

from __future__ import annotations

import copy
import random
from itertools import product

import pytest
import torch
from products import mesh_of
from torch import nn as dense_nn

import ndtp
from ndtp import Grid
from ndtp.testing import assert_equal, small_integers

TOKENS, HIDDEN, INNER = 16, 8, 16
GRID = Grid(z=2, x=1, y=2)


def integers(shape, seed, dtype=torch.float64):
    return small_integers(shape, seed, dtype, low=-2, high=2)


def dense_block(seed):
    block = dense_nn.ModuleDict({"up": dense_nn.Linear(HIDDEN, INNER), "down": dense_nn.Linear(INNER, HIDDEN)}).double()
    with torch.no_grad():
        for i, parameter in enumerate(block.parameters()):
            parameter.copy_(integers(tuple(parameter.shape), 10 * seed + i))
    return block


class Twins:
    """A dense block, the same on a grid, and what happens to both."""

    def __init__(self, seed, mesh, **options):
        self.mesh, self.dense = mesh, dense_block(seed)
        self.block = ndtp.nn.MLP.from_dense(self.dense["up"], self.dense["down"], "relu", mesh=mesh, **options)

    def pairs(self):
        for kind, layer in self.dense.items():
            ours = getattr(self.block, kind)
            yield from ((ours.weight, layer.weight, ours.plan.b), (ours.bias, layer.bias, ours.plan.bias))

    def both(self, change):
        for ours, dense, _ in self.pairs():
            change(ours), change(dense)

    def check(self, x, what):
        y = self.block(self.block.in_layout.shard(x, self.mesh.rank).to(self.block.up.weight.dtype))
        expected = self.dense["down"](torch.relu(self.dense["up"](x.to(self.dense["up"].weight.dtype))))
        assert_equal(y, self.block.out_layout.shard(expected, self.mesh.rank), what)


def step(optimizer_of):
    """A whole optimizer step, with gradients that are integers."""

    def change(one, other):
        ours, dense = optimizer_of(one.block.parameters()), optimizer_of(one.dense.parameters())
        for i, (p, d, layout) in enumerate(one.pairs()):
            grad = integers(tuple(d.shape), 70 + i)
            d.grad = grad
            p.grad = ndtp.nn.parameters.sharded(layout.shard(grad, one.mesh.rank).clone(), layout, one.mesh)
        ours.step(), dense.step(), ours.zero_grad(), dense.zero_grad()

    return change


def lerp(one, other):
    for (ours, dense, _), (theirs, their_dense, _) in zip(one.pairs(), other.pairs(), strict=True):
        ours.lerp_(theirs, 0.5), dense.lerp_(their_dense, 0.5)


def foreach_lerp(one, other):
    sides = zip(*[(a[:2], b[:2]) for a, b in zip(one.pairs(), other.pairs(), strict=True)], strict=True)
    ones, others = ([list(each) for each in zip(*side, strict=True)] for side in sides)
    for mine, theirs in zip(ones, others, strict=True):
        torch._foreach_lerp_(mine, theirs, 0.5)


def swap(one, other):
    for kind, layer in one.dense.items():
        ours, theirs = getattr(one.block, kind), getattr(other.block, kind)
        ours.weight, theirs.weight = theirs.weight, ours.weight
        layer.weight, other.dense[kind].weight = other.dense[kind].weight, layer.weight


def load(one, other):
    one.block.load_state_dict(other.block.state_dict())
    one.dense.load_state_dict(other.dense.state_dict())


def to_float_and_back(one, other):
    for module in (one.block, one.dense):
        module.to(torch.float32), module.to(torch.float64)


def freeze(one, other):
    one.both(lambda p: p.requires_grad_(not p.requires_grad))


def deep_copy(one, other):
    one.block, one.dense = copy.deepcopy(one.block), copy.deepcopy(one.dense)


def local_write(one, other):
    one.both(lambda p: getattr(p, "_local_tensor", p).mul_(2))


CHANGES = [
    lerp, foreach_lerp, swap, load, to_float_and_back, freeze, deep_copy, local_write,
    step(lambda ps: torch.optim.SGD(ps, 1.0)), step(lambda ps: torch.optim.SGD(ps, 1.0, foreach=True)),
    lambda one, other: one.both(lambda p: p.mul_(-1)),
    lambda one, other: one.both(lambda p: p.copy_(p + 1)),
    lambda one, other: None,
]  # fmt: skip


def random_changes(seeds):
    mesh = ndtp.ProcessGrid(GRID)
    x = integers((TOKENS, HIDDEN), 99)
    for seed in seeds:
        draw = random.Random(seed)
        twins = [Twins(i, mesh) for i in range(3)]
        for twin in twins * 2:  # the order of weights is learned
            twin.check(x, "before")
        for turn in range(8):
            one, other = draw.sample(twins, 2)
            for twin in twins:
                twin.check(x, f"seed {seed}, turn {turn}")
                if draw.random() < 0.4:
                    change = draw.choice(CHANGES)
                    with torch.no_grad():
                        change(one, other)


def test_a_forward_multiplies_by_what_the_weights_are_now(ranks):
    """Whatever changed them, also between the gather that was started ahead and the product."""
    ranks(4).run(random_changes, range(3))


def changes_behind_a_gather():
    """The first weight of `target` is on its way when it changes."""
    mesh = mesh_of(GRID)
    x = integers((TOKENS, HIDDEN), 99)
    for change in CHANGES:
        online, target = Twins(0, mesh), Twins(1, mesh)
        for twin in (online, target, online, target, online):
            twin.check(x, "before")
        with torch.no_grad():
            change(target, online)
        target.check(x, f"after {getattr(change, '__name__', change)}")
        online.check(x, "the other")


def test_no_change_behind_a_gather_goes_unnoticed(ranks):
    ranks(4).run(changes_behind_a_gather)


SCHEMES = [
    ("1d", Grid(z=1, x=1, y=4)), ("1d-sp", Grid(z=1, x=1, y=4)), ("2d", Grid(z=1, x=2, y=2)), ("3d", GRID),
]  # fmt: skip


def changed_before_backward(scheme, grid):
    """torch refuses it on a dense layer; so does every scheme, whether it kept a gathered copy or not."""
    mesh = mesh_of(grid)
    x = integers((TOKENS, HIDDEN), 99)
    for regather in ((), ("b",), ("a", "b")):
        twin = Twins(0, mesh, scheme=scheme, regather=regather)

        def forward(block, x):
            return block(block.in_layout.shard(x, mesh.rank).clone().requires_grad_()).sum()

        changes = [lambda w: w.mul_(2), lambda w: torch._foreach_mul_([w], 2.0)]
        for layer, change in product((twin.block.up, twin.block.down), changes):
            loss = forward(twin.block, x)
            with torch.no_grad():
                change(layer.weight)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        up = twin.block.up
        y = up(up.in_layout.shard(x, mesh.rank))
        with torch.no_grad():
            up.weight.mul_(2)
        y.sum().backward()  # its weight is not needed where x wants no gradient
        forward(twin.block, x).backward()


@pytest.mark.parametrize("scheme,grid", SCHEMES, ids=str)
def test_a_weight_that_changed_between_forward_and_backward_is_refused(ranks, scheme, grid):
    ranks(4).run(changed_before_backward, scheme, grid)


def moved_after_forward():
    mesh = mesh_of(GRID)
    for twin in (Twins(0, mesh), Twins(0, mesh)):
        twin.check(integers((TOKENS, HIDDEN), 99), "before")
    up, down = dense_block(0).values()
    model = ndtp.parallelize(dense_nn.Sequential(up, dense_nn.ReLU(), down), mesh)
    x = integers((TOKENS, HIDDEN), 99)
    y = model(x)
    y.sum().backward()
    expected = y.detach()
    del y
    assert_equal(model.float()(x.float()).double(), expected, "float()")
    assert_equal(model.double()(x), expected, ".double()")
    assert_equal(model.to(torch.bfloat16)(x.bfloat16()).double(), expected, ".to(bfloat16)")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)
    assert_equal(model(x.bfloat16()).double(), expected, "to_empty and load_state_dict")


@pytest.mark.cpu
def test_modules_move_after_their_first_forward(ranks):
    ranks(4).run(moved_after_forward)


def gathered_ahead_in_inference_mode():
    """A weight whose gather starts behind a forward in inference mode, and is used by one that trains."""
    mesh = ndtp.ProcessGrid(Grid(z=2))
    online, target = Twins(0, mesh), Twins(1, mesh)
    x = integers((TOKENS, HIDDEN), 99)
    for twin in (target, online) * 2:  # the order of weights is learned
        twin.check(x, "before")
    with torch.inference_mode():
        target.block(target.block.in_layout.shard(x, mesh.rank))
    shard = online.block.in_layout.shard(x, mesh.rank).clone().requires_grad_()
    online.block(shard).sum().backward()
    dense = x.clone().requires_grad_()
    online.dense["down"](torch.relu(online.dense["up"](dense))).sum().backward()
    assert_equal(shard.grad, online.block.in_layout.shard(dense.grad, mesh.rank), "the gradient of the input")


def test_a_weight_that_was_gathered_in_inference_mode_trains(ranks):
    ranks(2).run(gathered_ahead_in_inference_mode)
