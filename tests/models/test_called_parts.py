"""A model that has no `forward`, whose parts are called by themselves, is split when `parallelize` is called."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid


class Score(nn.Module):
    """It reads a weight of its own, and has parameters that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(32, 6)), nn.Parameter(torch.ones(()))
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(F.linear(x, self.weight))) * self.scale


class Pair(nn.Module):
    """As of Lightning: it is trained by another method, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 6))
        self.nets = nn.ModuleDict({"encoder": encoder, "scores": nn.ModuleList([Score(), Score()])})

    def loss_of(self, x: torch.Tensor, parts: int = 1) -> torch.Tensor:
        z = self.nets["encoder"](x)
        return sum(score(z).square().mean() for score in self.nets["scores"]) / parts


def trained(model: Pair, rows: torch.Tensor, parts: int = 1) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss_of(rows, parts).backward()
        optimizer.step()
    found = [each for p in model.parameters() for each in (p, p.grad)]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]


def check_parts(grid: Grid) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = mesh_of(grid)
    x, dense = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), Pair()
    model = copy.deepcopy(dense)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ndtp.parallelize(model, mesh, scheme="1d-sp" if "dp" in grid else "3d")
        data = ("dp",) if "dp" in grid else ()
        mine = trained(model, x.chunk(grid.size(data))[grid.index(mesh.rank, data)], grid.size(data))
    assert str(model.ndtp_report).startswith("replaced 4 of 4 Linears")
    for ours, theirs in zip(mine, trained(dense, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(z=1, x=2, y=2), Grid(dp=2, x=2)], ids=str)
def test_parts_of_a_model_without_a_forward(ranks, grid):
    ranks(grid.num_ranks).run(check_parts, grid)


def check_second_gradients(grid: Grid) -> None:
    torch.set_default_dtype(torch.float64)
    nets = nn.ModuleDict({"critic": nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))})
    dense = copy.deepcopy(nets)
    ndtp.parallelize(nets, mesh_of(grid))
    for each in (nets, dense):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (slope,) = torch.autograd.grad(each["critic"](x).sum(), x, create_graph=True)
        slope.square().mean().backward()
    for ours, theirs in zip(nets.parameters(), dense.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_part_that_gets_a_leaf_is_differentiated_twice(ranks):
    ranks(2).run(check_second_gradients, Grid(x=2))


def check_differing_calls(grid: Grid) -> None:
    nets = ndtp.parallelize(nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)}), mesh_of(grid))
    x = torch.ones(4, 8)
    with pytest.raises(ndtp.MismatchError, match=r"of its Linear ."):
        nets["one" if nets.ndtp_report.mesh.rank else "two"](x)
        nets["one"](x)


def test_ranks_that_call_other_parts_are_told(ranks):
    ranks(2).run(check_differing_calls, Grid(x=2))
