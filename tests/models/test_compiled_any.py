"""`torch.compile` of a model that is split by what a run shows, and of its parts: they run as they are."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid

HIDDEN = 16
IDS = torch.arange(32).view(4, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(32, HIDDEN), nn.ModuleList([Block(), Block()])
        self.last, self.head = Block(), nn.Linear(HIDDEN, 32)

    def forward(self, given):
        x = self.table(given["ids"] if isinstance(given, dict) else given)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def whole(model):
    return torch.compile(model)


def blocks(model):
    for block in model.blocks:
        block.compile()
    return model


def parts(model):
    model.last, model.head = torch.compile(model.last), torch.compile(model.head)
    model.blocks[0].attention.compile()
    return model


def check(change, waits):
    """Two steps, of which the second one has other sizes, for which compilers make sizes symbols."""
    torch.manual_seed(0)
    dense = Model().double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", example=None if waits else IDS)
    run = change(model)
    for ids in (IDS, IDS[:, :6]):
        given = {"ids": ids} if waits else ids
        run(given).square().mean().backward()
        dense(given).square().mean().backward()
    assert not model.ndtp_report.waits and model.ndtp_report.linears[0] == model.ndtp_report.linears[1] > 0
    compare(model, dense)


def compare(model, dense):
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


def check_step():
    """A compiled step, whose backward is in it, and the error of a graph that is to have no breaks."""
    torch.manual_seed(0)
    dense = Model().double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", example=IDS)

    def step(model, ids):
        loss = model(ids).square().mean()
        loss.backward()
        return loss

    compiled = torch.compile(step)
    for ids in (IDS, IDS[:, :6]):
        torch.testing.assert_close(compiled(model, ids), step(dense, ids))
    compare(model, dense)
    torch._dynamo.reset()  # or it takes frames for those that the step has broken already, at torch's own leave
    with pytest.raises(torch._dynamo.exc.Unsupported, match="memory of a part, which no graph can hold"):
        torch.compile(model, fullgraph=True)(IDS)


@pytest.mark.parametrize(("change", "waits"), [(whole, True), (blocks, False), (parts, False)])
def test_compiled_models_run_as_they_are(ranks, change, waits):
    ranks(2).run(check, change, waits)


def test_a_compiled_step(ranks):
    ranks(2).run(check_step)
