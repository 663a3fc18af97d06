import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import ndtp
from ndtp.testing import RankError, assert_matches_dense, small_integers

GRIDS = [{"x": 4}, {"z": 2, "x": 2, "y": 1}, {"dp": 2, "x": 2}]


def dense_block(hidden, inner, integers=False, dtype=torch.float32):
    torch.manual_seed(0)
    act = nn.ReLU() if integers else nn.GELU()
    block = nn.Sequential(OrderedDict(up=nn.Linear(hidden, inner), act=act, down=nn.Linear(inner, hidden)))
    if integers:
        for seed, parameter in enumerate(block.parameters()):
            parameter.data = small_integers(parameter.shape, seed)
    return block.to(dtype)


def parallel_block(dense, mesh, **arguments):
    return ndtp.nn.MLP.from_dense(dense.up, dense.down, "gelu", mesh=mesh, scheme="3d", **arguments)


def check_block(axes, dtype):
    mesh = ndtp.ProcessGrid(ndtp.Grid(axes))
    dense = dense_block(16, 32, dtype=dtype)
    return assert_matches_dense(parallel_block(dense, mesh), dense, torch.randn(8, 16, dtype=dtype), mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_matches(ranks, dtype):
    for axes in GRIDS:
        assert all(0 < error < 1 for error in ranks(4).run(check_block, axes, dtype, axes=axes))


def check_padded_exactly(axes):
    mesh = ndtp.ProcessGrid(ndtp.Grid(axes))
    dense = dense_block(7, 9, integers=True)
    block = ndtp.nn.MLP.from_dense(dense.up, dense.down, "relu", mesh=mesh, scheme="3d", pad=True)
    return assert_matches_dense(block, dense, small_integers((2, 4, 7), 5), mesh, exact=True)


def test_padding_is_cut_off_and_leading_dims_are_rows(ranks):
    assert ranks(4).run(check_padded_exactly, {"z": 2, "x": 2, "y": 1}) == [0.0] * 4
    assert ranks(4).run(check_padded_exactly, {"z": 1, "x": 2, "y": 2}) == [0.0] * 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = dense_block(8, 16)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens, scale):
        x = self.embedding(tokens)
        return (x + self.block(x)) * scale


def check_model(axes):
    torch.manual_seed(1)
    mesh = ndtp.ProcessGrid(ndtp.Grid(axes))
    dense = Model()
    parallel = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="3d")
    inputs = (torch.randint(11, (4, 6)), torch.randn(4, 6, 1))
    error = assert_matches_dense(parallel, dense, inputs, mesh)
    assert all(p.grad is None for p in (*dense.parameters(), *parallel.parameters()))
    return error


@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_a_parallelized_model_matches(ranks, axes):
    assert all(error > 0 for error in ranks(4).run(check_model, axes, axes=axes))


def check_one_rank():
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=1))
    dense = dense_block(4, 6)
    assert_matches_dense(parallel_block(dense, mesh), dense, torch.randn(3, 4), mesh)


def test_a_grid_of_one_rank():
    check_one_rank()


class Broken(nn.Module):
    """Rank 2 returns, or differentiates, something else."""

    def __init__(self, block, mesh, place):
        super().__init__()
        self.up, self.down, self.place = block.up, block.down, place
        self.block, self.mesh = [block], mesh

    @property
    def in_layout(self):
        return self.block[0].in_layout

    @property
    def out_layout(self):
        return self.block[0].out_layout

    def forward(self, x):
        y = self.block[0](x)
        off = torch.zeros_like(y)
        off[1, 0] = float(self.mesh.rank == 2)
        if self.place == "output":
            return y + off
        return y + off.detach() * (x - x.detach()).sum() if self.place == "gradient" else y


def check_broken(place, integers):
    mesh = ndtp.ProcessGrid(ndtp.Grid(z=2, x=1, y=2))
    dense = dense_block(8, 8, integers)
    block = ndtp.nn.MLP.from_dense(dense.up, dense.down, "relu" if integers else "gelu", mesh=mesh, scheme="3d")
    if place == "value" and mesh.rank == 2:
        block.down.weight.to_local().data[1, 1] += 1
    x = small_integers((8, 8), 7) if integers else torch.randn(8, 8)
    try:
        assert_matches_dense(Broken(block, mesh, place), dense, x, mesh, exact=integers)
    except AssertionError as error:
        return str(error)
    return "passed"


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize(
    "place, what", [("output", "output"), ("gradient", "gradient of input 0"), ("value", "value of down.weight")]
)
def test_every_rank_raises_the_same_error_that_names_tensor_rank_and_place(ranks, place, what, integers):
    messages = ranks(4).run(check_broken, place, integers)
    assert len(set(messages)) == 1
    assert messages[0].startswith("not the dense result on grid z=2 x=1 y=2:\n  rank 2 (z=1, x=0, y=0): " + what)
    assert "first at" in messages[0]
    if place == "output" and not integers:
        assert "first at (5, 0) of (8, 8)" in messages[0]


def check_names(names):
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=2))
    dense = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    block = ndtp.nn.MLP.from_dense(dense[0], dense[2], mesh=mesh, scheme="1d")
    assert_matches_dense(block, dense, torch.randn(2, 4), mesh, names=names)


def test_parameters_are_matched_by_name(ranks):
    names = {
        f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in (("up", 0), ("down", 2)) for kind in ("weight", "bias")
    }
    ranks(2).run(check_names, names)
    with pytest.raises(RankError, match=r"without a counterpart: 0\.bias.*\n.*up\.weight"):
        ranks(2).run(check_names, {})


def check_gated(is_wrong):
    """Its gate and what that scales are one weight on the grid, and two in the dense module."""
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=2))
    block = ndtp.nn.GatedMLP(8, 16, mesh=mesh, scheme="1d", dtype=torch.float64)
    dense = block.to_dense()
    if is_wrong == "value":
        with torch.no_grad():
            dense.gate.weight[3, 2] += 1e-3
    if is_wrong == "gradient":
        block.up.weight.register_hook(lambda grad: grad * 1.001)
    assert_matches_dense(block, dense, torch.randn(4, 8, dtype=torch.float64), mesh)


def test_a_module_tells_by_its_dense_form_which_parameter_is_whose(ranks):
    ranks(2).run(check_gated, "")
    with pytest.raises(RankError, match=r"value of gate\.weight, .*: 1 of 128 elements differ"):
        ranks(2).run(check_gated, "value")
    with pytest.raises(RankError, match=r"gradient of parameter gate\.weight"):
        ranks(2).run(check_gated, "gradient")
