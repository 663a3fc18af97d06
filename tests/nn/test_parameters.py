"""Sharded parameters: each rank makes and fills its own shard, padding is zero, and the dense tensor comes back."""

import torch
from products import mesh_of

from ndtp import Grid, Layout
from ndtp.nn.parameters import empty_parameter, fill_from_dense, fill_uniform, full
from ndtp.ops.products import local_shard
from ndtp.testing import assert_equal, small_integers


def check(grid):
    mesh = mesh_of(grid)
    layout = Layout(grid, "y", ("x", "z"))
    dense = small_integers((13, 6), 0)
    parameter = empty_parameter((16, 8), layout, mesh)
    with torch.no_grad():
        local_shard(parameter).fill_(float("nan"))  # what was there before must not stay, in the padding either
    fill_from_dense(parameter, layout, mesh, dense)
    padded = torch.nn.functional.pad(dense, (0, 2, 0, 3))
    assert_equal(local_shard(parameter), layout.shard(padded, mesh.rank), "this rank's shard")
    assert_equal(full(parameter, layout, mesh, (13, 6)), dense, "all of it")
    if mesh.device_mesh is not None:
        assert_equal(parameter.full_tensor(), padded, "as DTensor sees it")
        assert isinstance(parameter, torch.nn.Parameter) and parameter.shape == (16, 8)
    fill_uniform(parameter, layout, mesh, 0.5, (13, 6), 3, "weight")
    drawn = full(parameter, layout, mesh, (16, 8))
    assert (drawn[13:] == 0).all() and (drawn[:, 6:] == 0).all(), "padding is zero"
    assert drawn[:13, :6].unique().numel() == 13 * 6 and drawn.abs().max() <= 0.5, "every element its own draw"
    return drawn


def test_shards_of_parameters(ranks):
    expected = check(Grid(z=1, x=1, y=1))
    for grid in (Grid(z=2, x=2, y=2), Grid(z=1, x=4, y=2), Grid(z=8, x=1, y=1)):
        for drawn in ranks(8).run(check, grid):
            assert_equal(drawn, expected, f"{grid}")
