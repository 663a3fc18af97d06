"""`model.to` and the like, which move parameters: they stay the same objects, with all that code has put on them."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid


class Scaled(nn.Module):
    """Parameters that every rank has whole: of a norm, of the model's own, and a number."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 5)
        self.gain, self.scale = nn.Parameter(torch.rand(32)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.down(self.norm(self.up(x).relu() * self.scale) * self.gain)


class Task(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


MOVES = {
    "to where it is": lambda model: model.to("cpu"),
    "to the dtype that it has": lambda model: model.double(),
    "there and back": lambda model: model.float().double(),
}


def check_moved(axes, move):
    torch.manual_seed(0)
    dense, x = Scaled().double(), torch.randn(8, 8, dtype=torch.float64)
    mesh = mesh_of(Grid(**axes))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, example=x)
    rows = x.chunk(2)[mesh.coordinate["dp"]] if "dp" in axes else x
    share = 2 if "dp" in axes else 1
    before = dict(model.named_parameters())
    for p in before.values():
        p.note = "mine"
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, dense)]
    MOVES[move](dense)
    MOVES[move](model)
    task = Task(model)
    assert all(before[name] is p and p.note == "mine" for name, p in model.named_parameters())
    for _ in range(2):
        (task(rows).square().mean() / share).backward()
        dense(x).square().mean().backward()
        MOVES[move](model)  # with gradients
        for name, p in model.named_parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad  # a number's is plain
            torch.testing.assert_close(grad, dense.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), dense.get_parameter(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"x": 2}], ids=str)
def test_moved_parameters(ranks, axes, move):
    ranks(2).run(check_moved, axes, move)
