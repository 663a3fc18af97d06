"""Methods beside forward that compute with a model's parameters, told by what calls them."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid
from ndtp.models.at_work import computing


class Model(nn.Module):
    def forward(self, x):
        return self.head(self.features(self.first(x))) if x is not None else self.inner.forward(x)

    @staticmethod
    def first(x):
        return x[:1]

    def features(self, x):
        return self.again(x) * self.scale

    def again(self, x):
        return self.forward(x[1:])

    def tie(self):
        self.head = self.scale


def test_what_forward_calls_computes_and_nothing_else_does():
    """Methods that call each other; `head`, `scale` and a static method, which has no parameters, are none."""
    assert computing(Model) == {"features", "again"}


def slices_of_a_model(grid):
    """torch makes a slice by the class of the whole, which is ndtp's."""
    mesh, x = mesh_of(grid), torch.randn(8, 16)
    dense = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, example=x, scheme="3d")
    own = x.chunk(grid["dp"])[grid.index(mesh.rank, ("dp",))] if "dp" in grid else x
    dense[:-1](x).square().sum().backward()
    model[:-1](own).square().sum().backward()
    for (name, theirs), mine in zip(dense[:-1].named_parameters(), model[:-1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(dp=2)], ids=str)
def test_a_slice_of_a_split_model_is_a_model_of_its_layers(ranks, grid):
    ranks(2).run(slices_of_a_model, grid)
