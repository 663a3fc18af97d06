"""`parallelize(scheme="auto")` and plans that go straight into it."""

import copy

import pytest
import torch
from torch import nn

import ndtp
from ndtp import Grid, LayoutError, ProcessGrid
from ndtp.algebra.volume import Volume
from ndtp.models.auto import best_grid, best_layouts, request_for
from ndtp.testing import small_integers


def request(tokens, ranks, hidden=256, ffn=1024):
    return request_for([(hidden, ffn, False)], tokens, ranks, "cpu", "float32")


def test_best_grid_of_all_ranks():
    """Rows are not split outside of the pairs, so there is no dp; with many rows weights are what moves."""
    assert best_grid(request(64 * 1024, 8)).size(("z",)) == 8
    assert best_grid(request(64 * 1024, 8)).num_ranks == 8
    assert best_grid(request(64, 8))["z"] == 1


@pytest.mark.parametrize("tokens", [64, 1024, 65536])
@pytest.mark.parametrize("grid", [Grid(a=2, b=4), Grid(dp=2, a=2, b=2), Grid(a=2, b=2, c=2), Grid(x=4, y=2)], ids=str)
def test_layouts_on_a_given_grid(tokens, grid):
    """No other assignment of these axes moves less, ends of the pair included, when nothing but volume costs."""
    hardware = ndtp.planner.hardware.Hardware(
        "volume",
        1,
        ndtp.planner.hardware.Link(1e-3, 0, 0),
        ndtp.planner.hardware.Link(1e-3, 0, 0),
        {"float32": 1e6},
        0.0,
        1.0,
        1e9,
        0.0,
    )
    asked = request_for([(256, 1024, False)], tokens, grid.num_ranks, hardware, "float32")

    def moved(layouts):
        up, down = layouts.plans()
        total: Volume = up.volume((tokens, 256, 1024)) + down.volume((tokens, 1024, 256))
        outside = [axis for axis in grid if axis == "dp"]
        split = layouts.input.num_splits(0) * layouts.input.num_splits(1) // grid.size(outside)
        return total.elements + 2 * tokens * 256 // grid.size(outside) * (split - 1) // split

    found = best_layouts(asked, grid)
    tensor = [axis for axis in grid if axis != "dp"]
    for first in tensor:
        rest = [axis for axis in tensor if axis != first]
        for x, y, z in (((first,), tuple(rest[:1]), tuple(rest[1:])), ((), (first,), tuple(rest[:1]))):
            if len(x + y + z) == len(tensor):
                assert moved(found) <= moved(ndtp.models.auto._placed(grid, "3d", (x, y, z)))
    assert moved(found) <= moved(ndtp.models.auto._placed(grid, "1d", (tuple(tensor),)))


def test_refusals():
    with pytest.raises(LayoutError, match="found no Linear"):
        request_for([], 64, 8, "cpu", "float32")
    with pytest.raises(LayoutError, match="has no rate of float64"):
        request_for([(8, 8, False)], 64, 8, "h100-ib", "float64")
    with pytest.raises(LayoutError, match="it takes 3"):
        best_layouts(request(64, 16), Grid(a=2, b=2, c=2, d=2))
    with pytest.raises(LayoutError, match="give tokens="):
        ndtp.parallelize(model(), scheme="auto")


def test_rates_are_those_of_products():
    """A table of another dtype, of which the hardware has no rate, is no product."""
    mixed = nn.Sequential(nn.Embedding(4, 16).double(), *model())
    ndtp.parallelize(mixed, scheme="auto", tokens=64, hardware="h100-ib", strict=False)


def model():
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))


def same_as_dense(how):
    torch.manual_seed(0)
    dense, parallel = model(), model()
    with torch.no_grad():
        for i, (one, other) in enumerate(zip(dense.parameters(), parallel.parameters(), strict=True)):
            one.copy_(small_integers(one.shape, i))
            other.copy_(one)
    if how == "auto":
        ndtp.parallelize(parallel, scheme="auto", tokens=64, hardware="cpu")
    elif how == "auto on a mesh":
        ndtp.parallelize(parallel, ProcessGrid(Grid(a=2, b=2)), scheme="auto", tokens=64, hardware="cpu")
    else:
        best = ndtp.plan(tokens=64, hidden=16, ffn=32, ranks=4, hardware="cpu", dtype="float32", fixed={"dp": 1})[0]
        ndtp.parallelize(parallel, ProcessGrid(best.grid), best)
    x = small_integers((64, 16), 9)
    return (
        torch.equal(parallel(x), dense(x)),
        parallel.ndtp_report.mesh.grid.num_ranks,
        len(parallel.ndtp_report.replaced),
    )


@pytest.mark.parametrize("how", ["auto", "auto on a mesh", "a plan"])
def test_equals_dense(ranks, how):
    assert ranks(4).run(same_as_dense, how) == [(True, 4, 2)] * 4


def without_pairs():
    """Attention and layers without a partner are planned as well, and split from end to end."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    dense = nn.Sequential(nn.Embedding(32, 16), layer, nn.Linear(16, 32)).double()
    model = ndtp.parallelize(copy.deepcopy(dense), scheme="auto", tokens=64, hardware="cpu")
    ids = torch.arange(32).view(4, 8)
    torch.testing.assert_close(model(ids).gathered(), dense(ids))
    return model.ndtp_report.linears


def test_any_model(ranks):
    assert ranks(4).run(without_pairs) == [(4, 4)] * 4


def block_of_a_plan():
    best = ndtp.plan(tokens=64, hidden=16, ffn=32, ranks=4, hardware="cpu", dtype="float32")[0]
    mlp = ndtp.nn.MLP(16, 32, mesh=ProcessGrid(best.grid), bias=False, **best.arguments)
    return mlp.volume(64).total == best.volume_bytes


def test_plan_goes_straight_into_a_block(ranks):
    assert ranks(4).run(block_of_a_plan) == [True] * 4
