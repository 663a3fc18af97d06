"""Layers of one input are one product: what a step does not ask for is not kept."""

import copy

import torch
from products import mesh_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import Grid


class Heads(nn.Module):
    """Two heads, of which one runs sometimes; an MLP, whose second input may stay away."""

    def __init__(self):
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.gate, self.up, self.down = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(16, 4)
        self.is_whole, self.is_checkpointed = True, False

    def forward(self, x):
        if self.is_checkpointed:
            return checkpoint(self.computed, x, use_reentrant=False)
        return self.computed(x)

    def computed(self, x):
        h = self.trunk(x).relu()
        y = self.first(h)
        y = y + self.second(h) if self.is_whole else y
        gate = self.gate(y).sigmoid()
        return self.down(gate * self.up(y)) if self.is_whole else y * gate.sum()


def check_copies():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 32).view(4, 8).double()
    dense = Heads().double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), example=x)
    for is_whole, is_checkpointed in ((True, False), (False, False), (True, True), (False, True)):
        found = []
        for each in (dense, model):
            each.is_whole, each.is_checkpointed = is_whole, is_checkpointed
            y = each(x)
            y.square().sum().backward()
            found.append(y)
        copied = copy.deepcopy(model)  # what holds a graph cannot be
        torch.testing.assert_close(copied(x).gathered(), found[0])
        torch.testing.assert_close(found[1].gathered(), found[0])
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_a_model_can_be_copied_after_any_step(ranks):
    ranks(2).run(check_copies)


class Blocks(nn.Module):
    """Blocks that all look at one input, each in a checkpoint of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "key", "value")}) for _ in range(2)
        )

    def forward(self, x, c):
        for block in self.blocks:
            run = lambda x, b=block: x + b["query"](x) * b["key"](c).tanh() * b["value"](c)  # noqa: E731
            x = checkpoint(run, x, use_reentrant=False)
        return x


def check_blocks():
    torch.manual_seed(0)
    x, c = torch.randn(2, 4, 8).double()
    dense = Blocks().double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d")
    for _ in range(2):
        for each in (dense, model):
            each(x, c).square().sum().backward()
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_checkpointed_blocks_of_one_input_hold_no_result_of_another(ranks):
    ranks(2).run(check_blocks)
