"""A checkpoint that is recomputed gives the dense gradients, and its forward runs again on parts, not on the whole."""

import copy

import torch
from products import mesh_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import CommMeter, Grid

HIDDEN, IDS = 16, torch.arange(32).view(4, 8)


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
        self.head, self.again = nn.Linear(HIDDEN, 32), False

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def check():
    torch.manual_seed(0)
    dense, volumes = Model().double(), []
    dense(IDS).square().mean().backward()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d-sp", example=IDS)
    for model.again in (False, True):
        model.zero_grad()
        with CommMeter() as meter:
            model(IDS).square().mean().backward()
        volumes.append(meter.volume.by("phase"))
        for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
    once, twice = volumes
    assert twice["dgrad"] == once["dgrad"] and once["forward"] < twice["forward"] < 2 * once["forward"], volumes


def test_what_is_recomputed(ranks):
    ranks(2).run(check)
