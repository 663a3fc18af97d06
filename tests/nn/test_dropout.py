"""Dropout by itself: probability, scale, modes.  Equality over grids is tested with the modules that use it."""

import pytest
import torch
from products import mesh_of

from ndtp import Grid, Layout
from ndtp.nn import Dropout
from ndtp.testing import assert_equal


def test_probability_scale_and_modes():
    mesh = mesh_of(Grid(x=1))
    dropout = Dropout(0.25, Layout(mesh.grid, None, None), mesh)
    x = torch.ones(256, 256, requires_grad=True)
    y = dropout(x)
    values, counts = y.detach().unique(return_counts=True)
    assert_equal(values, torch.tensor([0.0, 1 / 0.75]))
    assert counts[0].item() == pytest.approx(0.25 * x.numel(), rel=0.05)
    y.sum().backward()
    assert_equal(x.grad, y.detach(), "the gradient has the same mask")
    assert not torch.equal(dropout(x), y), "another mask every time"
    assert dropout.eval()(x) is x and Dropout(0.0, dropout.layout, mesh)(x) is x
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match="not in"):
            Dropout(p, dropout.layout, mesh)


def shards_of_a_mask(grid):
    mesh = mesh_of(grid)
    layout = Layout(grid, ("z", "y"), "x")
    y = Dropout(0.5, layout, mesh)(torch.ones(layout.shard_shape((16, 3, 8)[::2]), dtype=torch.bfloat16))
    return y


def shards_of_three_dims(grid, *spec):
    mesh = mesh_of(grid)
    dropout = Dropout.from_dense(torch.nn.Dropout(0.5), layout=Layout(grid, *spec), mesh=mesh)
    assert dropout.in_layout == dropout.out_layout and not dropout.volume(4).total and dropout.to_dense().p == 0.5
    assert dropout.memory((4, 6, 8)).kept == torch.ones(dropout.layout.shard_shape((4, 6, 8))).nbytes
    return dropout(torch.ones(dropout.layout.shard_shape((4, 6, 8))))


def test_any_layout(ranks):
    torch.manual_seed(0)
    whole = shards_of_three_dims(Grid(x=1), None, None, "x")
    grid = Grid(x=2, y=2)
    for spec in (("x", None, "y"), (None, "y", "x"), (("x", "y"), None, None)):
        parts = ranks(4).run(shards_of_three_dims, grid, *spec)
        assert_equal(Layout(grid, *spec).from_shards(parts), whole, str(spec))


def test_shards_are_slices_of_the_whole_mask(ranks):
    torch.manual_seed(0)  # as the pool does
    whole = shards_of_a_mask(Grid(z=1, x=1, y=1))
    grid = Grid(z=2, x=2, y=2)
    layout = Layout(grid, ("z", "y"), "x")
    assert_equal(layout.from_shards(ranks(8).run(shards_of_a_mask, grid)), whole)
