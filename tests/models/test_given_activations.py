"""A parameter's gradient, numbers, entry of a state dict and optimizer's state may be a split activation."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid


class Kept(nn.Module):
    """It keeps what it computes, as code of Hebbian rules and of per-sample gradients does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.inner, self.norm = nn.Linear(6, 32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.norm(torch.relu(self.up(x)))
        self.outer = self.hidden.t() @ self.inner(self.hidden)
        return self.inner(self.hidden)


def given(model: Kept) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()
    found = {}
    with torch.no_grad():
        model(x)
        for layer, name in ((model.inner, "inner"), (model.norm, "norm")):
            layer.bias.grad = model.hidden.sum(0)
            found[f"gradient of {name}"] = layer.bias.grad
            optimizer.state[layer.bias]["momentum_buffer"] = model.hidden.mean(0)
            layer.bias.data = model.hidden[0].clone()  # or both biases would share memory
        model.inner.weight.grad = model.outer
        optimizer.step()
        model.load_state_dict({**model.state_dict(), "inner.weight": model.outer, "norm.weight": model.hidden[1]})
    return found | {name: p.detach() for name, p in model.named_parameters()}


def check_given(grid: Grid, scheme: str) -> None:
    torch.set_default_dtype(torch.float64)
    dense = Kept()
    mine = given(ndtp.parallelize(copy.deepcopy(dense), mesh_of(grid), scheme=scheme))  # type: ignore[arg-type]
    for name, expected in given(dense).items():
        own = mine[name]
        whole = own.full_tensor() if hasattr(own, "full_tensor") else own
        torch.testing.assert_close(whole, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("grid", "scheme"), [(Grid(x=2), "1d-sp"), (Grid(x=2, y=2), "2d")], ids=str)
def test_parameters_take_split_activations(ranks, grid, scheme):
    ranks(grid.num_ranks).run(check_given, grid, scheme)
