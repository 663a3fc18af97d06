"""What may stand for a mesh, and what is said of anything else."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ndtp
from ndtp import Grid, GridError, LayoutError, ProcessGrid
from ndtp.models.chosen_meshes import even_grid


def pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def check_given():
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    expected = pair()(x)
    named = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("x",))
    for mesh in (Grid(x=2), ProcessGrid(Grid(x=2)), named, None):  # left out: all ranks
        model = ndtp.parallelize(pair(), mesh, scheme="1d")
        torch.testing.assert_close(model(x), expected)
        assert model[0].mesh.grid["x"] == 2
    for mesh in (Grid(x=2), named):
        with pytest.raises(GridError, match="once, and give it to all modules"):
            ndtp.nn.MLP(4, 8, mesh=mesh, scheme="1d")
    model = ndtp.parallelize(pair())
    torch.testing.assert_close(model(x), expected)
    assert "no mesh was given: all ranks on grid z=1 x=1 y=2" in str(model.ndtp_report)
    with pytest.raises(GridError, match="mesh_dim_names="):
        ndtp.parallelize(pair(), init_device_mesh(torch.get_default_device().type, (2,)), scheme="1d")


@pytest.mark.parametrize(
    "count, shape", [(1, (1, 1, 1)), (2, (1, 1, 2)), (6, (1, 2, 3)), (8, (2, 2, 2)), (12, (2, 2, 3))]
)
def test_all_ranks_lie_evenly_on_the_axes_of_a_scheme(count, shape):
    assert even_grid(count, ("z", "x", "y")).shape == shape


@pytest.mark.parametrize("options", [{}, {"scheme": "1d"}, {"scheme": "auto", "tokens": 8}], ids=str)
def test_ranks_that_were_started_and_are_no_group_yet(monkeypatch, options):
    """Each rank would train the whole model by itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GridError, match=r"the 2 ranks .*\n  fix: .*init_process_group"):
        ndtp.parallelize(pair(), **options)
    monkeypatch.delenv("WORLD_SIZE")
    assert ndtp.parallelize(pair(), **options).ndtp_report.mesh.grid.num_ranks == 1


def test_what_may_be_given(ranks):
    ranks(2).run(check_given)


@pytest.mark.parametrize("make", [
    lambda mesh: ndtp.parallelize(pair(), mesh),
    lambda mesh: ndtp.nn.MLP(4, 8, mesh=mesh),
    lambda mesh: ndtp.nn.Linear(4, 8, mesh=mesh),
    lambda mesh: ndtp.nn.Attention(4, heads=2, mesh=mesh),
    lambda mesh: ndtp.nn.RMSNorm(4, mesh=mesh),
    lambda mesh: ndtp.nn.Embedding(4, 4, mesh=mesh),
    lambda mesh: ndtp.nn.MoE(4, 8, experts=2, top_k=1, mesh=mesh),
])  # fmt: skip
def test_what_was_meant(make):
    for given, fix in (((2, 3), r"Grid\(y=2, x=3\)"), (4, r"Grid\(x=4\)"), ("3d", "scheme='3d'")):
        with pytest.raises(GridError, match=fix):
            make(given)


@pytest.mark.parametrize("said, meant", [("3D", "3d"), ("megatron", "1d"), ("1D_SP", "1d-sp"), ("summa", "2d")])
def test_schemes_that_were_meant(said, meant):
    mesh = ProcessGrid(Grid(x=1))
    for make in (
        lambda: ndtp.parallelize(pair(), mesh, scheme=said),
        lambda: ndtp.nn.MLP(4, 8, mesh=mesh, scheme=said),
    ):
        with pytest.raises(LayoutError, match=f"fix: scheme='{meant}'"):
            make()


def test_a_scheme_in_the_place_of_a_plan():
    with pytest.raises(LayoutError, match="fix: scheme='3d', by its name"):
        ndtp.parallelize(pair(), ProcessGrid(Grid(x=1)), "3d")
