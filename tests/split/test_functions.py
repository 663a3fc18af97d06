"""A checkpoint that is recomputed gives the dense gradients, and its forward runs again on parts, not on the whole."""

import copy
import sys
import types
from functools import partial

import pytest
import torch
from own_functions import Sorted
from products import mesh_of
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.split.functions import _GIVEN

HIDDEN, IDS = 16, torch.arange(32).view(4, 8)


def once_more(block, x):
    return checkpoint(block, x, use_reentrant=False)


def nested(block, x):
    return checkpoint(partial(once_more, block), x, use_reentrant=False)


def selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(32, HIDDEN), nn.ModuleList([Block(), Block()])
        self.head, self.again = nn.Linear(HIDDEN, 32), None

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = self.again(block, x) if self.again else block(x)
        return self.head(x)


def check():
    torch.manual_seed(0)
    dense, volumes = Model().double(), []
    dense(IDS).square().mean().backward()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d-sp", example=IDS)
    for model.again in (None, once_more, nested):
        model.zero_grad()
        with CommMeter() as meter:
            model(IDS).square().mean().backward()
        volumes.append(meter.volume.by("phase"))
        for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
    once, twice, thrice = volumes
    assert twice["dgrad"] == once["dgrad"] and once["forward"] < twice["forward"] < 2 * once["forward"], volumes
    assert thrice["dgrad"] == once["dgrad"] and twice["forward"] <= thrice["forward"] < 3 * once["forward"], volumes
    model.again = partial(checkpoint, use_reentrant=False, context_fn=selective)
    with pytest.raises(LayoutError, match="a selective checkpoint"):
        model(IDS)


def test_what_is_recomputed(ranks):
    ranks(2).run(check)


in_order = _GIVEN.__get__(None, Sorted)  # taken before any model was split

# A Python module of its own, which has a function of autograd and uses it by a name of its own.
ELSEWHERE = types.ModuleType("functions_elsewhere")
sys.modules[ELSEWHERE.__name__] = ELSEWHERE
exec(
    """
import torch

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.flip(-1) / 2

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(-1) / 2

def use(x):
    return halve(x)
""",
    vars(ELSEWHERE),
)
ELSEWHERE.halve = _GIVEN.__get__(None, ELSEWHERE.Halved)


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN), nn.Linear(HIDDEN, 8)
        self.held = in_order

    def forward(self, x):
        return self.out(in_order(ELSEWHERE.use(self.down(self.held(self.up(x))))))


def check_held():
    torch.manual_seed(0)
    dense = Holding().double()
    x = torch.randn(4, HIDDEN, dtype=torch.float64)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", example=x)
    for each in (dense, model):
        each(x).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_functions_that_a_model_holds_take_the_whole(ranks):
    ranks(2).run(check_held)
