"""What a checkpoint runs again in backward finds what it found in the model's forward, and runs once."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import Grid

HIDDEN, IDS = 16, torch.arange(32).view(4, 8) % 24
KINDS = ("loss", "nested", "collective", "reads")


class Model(nn.Module):
    def __init__(self, kind, is_reentrant):
        super().__init__()
        self.kind, self.runs = kind, 0
        self.once = partial(checkpoint, use_reentrant=is_reentrant)
        self.other_way = partial(checkpoint, use_reentrant=not is_reentrant)
        self.table, self.inner, self.head = nn.Embedding(24, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 24)
        self.scale, self.matrix = nn.Parameter(torch.rand(HIDDEN) + 0.5), nn.Parameter(torch.rand(HIDDEN, HIDDEN))

    def logits(self, x):
        return self.head(x)

    def block(self, x):
        self.runs += 1
        return torch.tanh(self.inner(x) @ self.matrix) * self.scale

    def forward(self, ids):
        logits, x = self.logits, torch.relu(self.inner(self.table(ids)))

        def loss(x):
            self.runs += 1
            return F.cross_entropy(logits(x).flatten(0, 1), ids.flatten())

        def of_code(x):
            self.runs += 1
            return F.linear(x * self.scale, self.table.weight).sin()

        def collective(x):
            self.runs += 1
            total = x.detach().sum()
            if dist.is_initialized():  # of this rank's rows: no rank has others
                dist.all_reduce(total)
            return self.head(x * total.sin())

        if self.kind == "loss":
            return self.once(loss, x)
        if self.kind == "reads":
            return self.once(self.block, self.once(self.block, x)).square().sum()
        if self.kind == "nested":
            return self.once(lambda x: self.other_way(of_code, x), x).square().mean()
        return self.once(collective, x).square().mean()


def check(kind, is_reentrant, sizes):
    torch.manual_seed(0)
    dense = Model(kind, is_reentrant).double()
    mesh = mesh_of(Grid(**sizes))
    mine = IDS.chunk(sizes.get("dp", 1))[mesh.coordinate.get("dp", 0)]
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d-sp", example=mine)
    with mock.patch.object(dist, "is_initialized", lambda: False):
        expected = dense(IDS)
        runs = dense.runs
        expected.backward()
    model.runs = 0
    found = model(mine)
    assert model.runs == runs, "nothing is run again before backward"
    found.backward()
    assert model.runs == dense.runs
    if "dp" not in sizes:
        torch.testing.assert_close(found.detach(), expected.detach())
    for (name, p), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), theirs.grad, msg=name)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_code_that_is_run_again(ranks, kind, is_reentrant):
    sizes = {"dp": 2, "x": 2} if kind == "reads" else {"x": 2}
    ranks(2 * len(sizes)).run(check, kind, is_reentrant, sizes)
