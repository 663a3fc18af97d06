"""Users' models with their Linear pairs swapped: results, gradients, keys and reports."""

import inspect

import pytest
import torch
from products import mesh_of
from test_linear_pairs import Block, Gated, TwoLayers, Untraceable
from torch import nn
from torch.nn import functional as F
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid, Layout, LayoutError
from ndtp.algebra.schemes import SCHEMES
from ndtp.models.dry_step import end_of_step
from ndtp.models.parallelize import BoundaryLinear
from ndtp.testing import assert_equal


class Numbers(nn.Module):
    def forward(self, x):
        return x.view(-1)  # which a dense layer's result always allows


def sequential():
    return nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 7), Numbers(), nn.Tanh())


def attributes():
    return TwoLayers(lambda_gelu)


def lambda_gelu(self, h):
    return F.gelu(h)


class Transformer(nn.Module):
    """HF-like: embedding, residual blocks with norms and gated blocks, tied head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList([Block(), Gated(), Block()])
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def transformer():
    return Transformer().eval()


class EncoderLayer(nn.Module):
    """MindSpore-like: one projection pair in a cell, mapping and projection by name."""

    def __init__(self):
        super().__init__()
        self.mapping, self.projection, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(x + self.projection(torch.relu(self.mapping(x))))


def encoder():
    return nn.Sequential(EncoderLayer(), EncoderLayer())


def torch_encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )


# Pairs are split where a plan names them; the general rule splits the others.
MODELS = {
    "sequential": (sequential, (5, 12), None),
    "attributes": (attributes, (2, 3, 4), None),
    "transformer": (transformer, None, None),
    "encoder": (encoder, (7, 6), None),
    "by name": (lambda: nn.Sequential(Untraceable()), (3, 4), {"*.fc1": "up", "*.fc2": "down"}),
    "gated": (lambda: nn.Sequential(Gated()), (3, 4), None),
    "gated by name": (lambda: nn.Sequential(Gated()), (3, 4), {"*.gate*": "gate", "*.up*": "up", "*.down*": "down"}),
    "torch's encoder": (torch_encoder, (2, 3, 8), {"layers.*.linear1": "up", "layers.*.linear2": "down"}),
}


def example(shape, rows=None):
    generator = torch.Generator().manual_seed(3)
    if shape is None:
        return torch.randint(0, 11, (rows or 3, 5), generator=generator)
    return torch.randn(rows or shape[0], *shape[1:], generator=generator, dtype=torch.float64)


def check_models(grid, scheme, names=tuple(MODELS)):
    """Awkward sizes everywhere: what does not divide is padded."""
    mesh = mesh_of(grid)
    for name in names:
        make, shape, plan = MODELS[name]
        where = f"{name}, {grid}, {scheme}"
        torch.manual_seed(0)
        dense = make().double()
        torch.manual_seed(0)
        model = make().double()
        keys = list(model.state_dict())
        returned = ndtp.parallelize(model, mesh, plan, scheme=scheme)
        assert returned is model and model.ndtp_report.replaced, f"{where}: {model.ndtp_report}"
        assert list(model.state_dict()) == keys, f"{where}: keys"
        # Every data-parallel rank has rows of its own.
        splits, index = grid.size([a for a in grid if a == "dp"]), mesh.coordinate.get("dp", 0)
        x = example(shape, splits * (3 if shape is None else shape[0]))
        local = x.chunk(splits)[index].clone()
        if shape is not None:
            x.requires_grad_(), local.requires_grad_()
        with CommMeter() as meter:
            y = model(local)
            y.square().sum().backward()
        expected = dense(x)
        expected.square().sum().backward()
        torch.testing.assert_close(y, expected.chunk(splits)[index], rtol=1e-9, atol=1e-10, msg=f"{where}: y")
        if shape is not None:
            torch.testing.assert_close(local.grad, x.grad.chunk(splits)[index], rtol=1e-9, atol=1e-10)
        for (key, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            real = tuple(slice(0, size) for size in theirs.shape)
            torch.testing.assert_close(grad[real], theirs.grad, rtol=1e-8, atol=1e-9, msg=f"{where}: {key}")
        if grid.num_ranks > 1 and plan is not None and name != "torch's encoder":
            volume = model.ndtp_report.volume(x[..., 0].numel())
            # The input of the first pair wants a gradient here, so every pair runs its full backward.
            assert meter.volume == volume, f"{where}: {meter.volume} != {volume}"
        elif grid.num_ranks > 1 and plan is None:
            first = next(iter(inspect.signature(model.forward).parameters))
            with CommMeter() as meter:
                end_of_step(model(local)).backward()
            volume = model.ndtp_report.volume(**{first: local})
            assert meter.volume.total == volume.total, f"{where}: {meter.volume} != {volume}"
        assert not mesh.collectives.in_flight, "handles left over"


# Under every scheme a pair, a gated block and models of both, each with its own way to be found; in turns.
CASES = {
    "1d": {
        Grid(x=4): ("attributes", "gated", "transformer"),
        Grid(dp=2, x=2): ("encoder", "gated by name"),
    },
    "1d-sp": {
        Grid(x=4): ("by name", "gated by name", "sequential"),  # some ranks have no rows
        Grid(dp=2, x=2): ("transformer", "torch's encoder"),
    },
    "2d": {
        Grid(x=2, y=4): ("encoder", "gated by name"),
        Grid(x=2, y=2): ("transformer", "torch's encoder"),
        Grid(dp=2, x=2, y=2): ("attributes", "gated"),
    },
    "2d-features": {
        Grid(x=2, y=2): ("by name", "gated", "transformer", "sequential"),
    },
    "3d": {
        Grid(z=2, x=2, y=2): ("attributes", "gated by name", "transformer"),
        Grid(z=2, x=1, y=2): ("sequential", "gated", "torch's encoder"),
        Grid(dp=2, z=2, x=1, y=1): ("by name", "encoder"),
    },
}


@pytest.mark.parametrize("scheme", by_turns(CASES, 2))
def test_models_equal_their_dense_selves(ranks, scheme):
    for grid, names in CASES[scheme].items():
        ranks(grid.num_ranks).run(check_models, grid, scheme, names)


def test_the_cases_have_all():
    assert set(CASES) == set(SCHEMES)
    assert {name for grids in CASES.values() for names in grids.values() for name in names} == set(MODELS)


def test_one_rank():
    check_models(Grid(x=1), "1d")


# ---- reports ----


def check_report():
    mesh = mesh_of(Grid(z=2, x=2, y=2))
    model = ndtp.parallelize(transformer(), mesh)
    report = model.ndtp_report
    pairs = [[f"blocks.{i}.mlp.{name}" for name in ("c_fc", "c_proj")] for i in (0, 2)]
    gated = [f"blocks.1.{name}_proj" for name in ("gate", "up", "down")]
    layers = [*pairs[0], *gated, *pairs[1], "head", "embedding"]
    assert list(report.replaced)[: len(layers)] == layers, report  # and norms
    text = str(report)
    assert "replaced blocks.{0,2}.mlp.c_fc: A[M_zy, K_x] . B[N_y, K_xz]" in text, text
    named = ndtp.parallelize(encoder(), mesh, {"0.mapping": "up", "0.projection": "down"})
    assert named.ndtp_report.kept == {"1.mapping": "not named in the plan", "1.projection": "not named in the plan"}
    assert isinstance(named[0].mapping, nn.Linear), "for model.apply(init), peft and whoever asks"
    with pytest.raises(LayoutError, match=r"'mapping.weight' lies on a grid already: .*\n  fix: no second call"):
        ndtp.parallelize(named[0], mesh, example=torch.ones(8, named[0].mapping.in_features))
    return text


def test_report(ranks):
    texts = ranks(8).run(check_report)
    assert all(text == texts[0] for text in texts)


# ---- weights, modes, dropout, single layers ----


def check_weights_and_modes():
    mesh = mesh_of(Grid(z=2, x=2, y=2))
    dense = encoder()
    dense[0].mapping.requires_grad_(False)
    model = ndtp.parallelize(encoder().eval(), mesh)
    assert not any(m.training for m in model.modules()), "eval stays"
    frozen = encoder()
    frozen.load_state_dict(dense.state_dict())
    frozen[0].mapping.requires_grad_(False)
    ndtp.parallelize(frozen, mesh, {"*.mapping": "up", "*.projection": "down"})
    assert not frozen[0].mapping.weight.requires_grad and frozen[0].projection.weight.requires_grad
    for i in range(2):
        for name in ("mapping", "projection"):
            layer, theirs = getattr(frozen[i], name), getattr(dense[i], name)
            assert isinstance(layer, BoundaryLinear) and (layer.in_features, layer.out_features) == (
                theirs.in_features,
                theirs.out_features,
            )
            assert_equal(layer.to_dense().weight, theirs.weight, f"{i}.{name}")
            assert_equal(layer.to_dense().bias, theirs.bias, f"{i}.{name} bias")
    by_rule = encoder()
    by_rule.load_state_dict(dense.state_dict())
    by_rule[0].mapping.requires_grad_(False)
    ndtp.parallelize(by_rule, mesh)
    for (name, mine), theirs in zip(by_rule.named_parameters(), frozen.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad, name
        assert_equal(mine.full_tensor(), dense.get_parameter(name), name)


def dropout_model(grid, scheme, p=0.5, rows=6):
    """Dense output under dropout, with dropout between the layers; rows that do not divide."""
    mesh = mesh_of(grid)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(p), nn.Linear(10, 6)).double()
    ndtp.parallelize(model, mesh, scheme=scheme)
    torch.manual_seed(5)
    drawn = model(example((rows, 6))).gathered()
    return drawn, model.eval()(example((rows, 6))).gathered()


def test_weights_modes_and_dropout(ranks):
    ranks(8).run(check_weights_and_modes)
    expected, without = dropout_model(Grid(x=1), "1d")
    assert not torch.equal(expected, without)
    for grid, scheme in [(Grid(x=4), "1d"), (Grid(x=4), "1d-sp"), (Grid(z=2, x=2, y=2), "3d")]:
        for results in ranks(grid.num_ranks).run(dropout_model, grid, scheme):
            torch.testing.assert_close(results[0], expected.cpu(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(results[1], without.cpu(), rtol=1e-12, atol=1e-12)


def check_single_layer():
    """Layouts of one layer; rows that dp splits are split outside too, as they are for pairs."""
    grid = Grid(dp=2, x=2, y=2)
    mesh = mesh_of(grid)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 7)).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 7)).double()
    rows, weight = Layout(grid, ("dp", "y"), "x"), Layout(grid, "y", "x")
    ndtp.parallelize(model, mesh, {"0": "up", "2": "down", "4": (rows, weight)}, scheme="2d")
    x = example((6, 6))
    local = x.chunk(2)[mesh.coordinate["dp"]]
    y = model(local)
    torch.testing.assert_close(y, dense(x).chunk(2)[mesh.coordinate["dp"]], rtol=1e-9, atol=1e-10)
    y.sum().backward()
    dense(x).sum().backward()
    grad = model[4].weight.grad.full_tensor()[:7, :6]
    torch.testing.assert_close(grad, dense[4].weight.grad, rtol=1e-9, atol=1e-10)


def test_single_layer_with_explicit_layouts(ranks):
    ranks(8).run(check_single_layer)


def test_errors():
    mesh = mesh_of(Grid(x=1))
    tied = transformer()
    layout = Layout(mesh.grid, None, None)
    for plan, words in [
        ({"head": (layout, layout)}, "shares a parameter"),
        ({"embedding": (layout, layout)}, "no nn.Linear"),
        ({"nope": (layout, layout)}, "no nn.Linear"),
        ({"blocks.0.mlp.c_fc": (layout,)}, "an input and a weight layout"),
    ]:
        with pytest.raises(LayoutError, match=words):
            ndtp.parallelize(tied, mesh, plan)
    with pytest.raises(LayoutError, match="from_dense"):
        ndtp.parallelize(nn.Linear(2, 2), mesh, {"": (layout, layout)})
    mixed = nn.Sequential(nn.Linear(4, 8), ndtp.nn.MLP(8, 16, mesh=mesh), nn.LayerNorm(8))
    for given in ({}, {"example": torch.ones(2, 4)}):
        with pytest.raises(LayoutError, match=r"'1' is split already: an ndtp.nn.MLP takes .*\n  fix: .* to_dense\(\)"):
            ndtp.parallelize(mixed, mesh, **given)
    assert not any(isinstance(p, ndtp.nn.Linear) for p in mixed[:1]), "nothing was replaced before"
    parts = nn.Sequential(ndtp.parallelize(transformer(), mesh), nn.Linear(4, 4))
    with pytest.raises(
        LayoutError, match=r"'0' is split already, by a .*\n  fix: one parallelize, of Sequential alone"
    ):
        ndtp.parallelize(parts, mesh)
    with pytest.raises(LayoutError, match="nothing was replaced"):  # of a model that was dense
        ndtp.parallelize(nn.Sequential(nn.Linear(4, 4)), mesh, keep=["0"])
    for lazy, name in ((nn.LazyLinear(4), "1.weight"), (nn.LazyBatchNorm1d(affine=False), "1.running_mean")):
        with pytest.raises(LayoutError, match=rf"'{name}' is of a lazy layer, .*\n  fix: call the dense model once"):
            ndtp.parallelize(nn.Sequential(nn.Linear(4, 8), lazy), mesh)
    mixed[1] = mixed[1].to_dense()
    ndtp.parallelize(mixed, mesh, example=torch.ones(2, 4))
    assert list(mixed.ndtp_report.replaced) == ["0", "1.up", "1.down"]


class OfOneMemory(nn.Module):
    """Two layers and a buffer, some of which have elements in the same memory."""

    def __init__(self, how):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        flat = torch.randn(64)
        if how == "tied by data":
            self.down.weight.data = self.up.weight.data.T
        elif how == "a buffer":
            self.register_buffer("kept", self.up.weight.data[2:])
        elif how == "columns":
            self.up.weight, self.down.weight = (nn.Parameter(x) for x in (flat.view(8, 8)[:, :4], flat.view(8, 8)[:4]))
        elif how == "parts":
            self.up.weight, self.down.weight = (nn.Parameter(x) for x in (flat[:32].view(8, 4), flat[32:].view(4, 8)))
        elif how == "columns apart":
            self.up.weight, self.down.weight = (
                nn.Parameter(x) for x in (flat.view(8, 8)[:, :4], flat.view(8, 8)[:, 4:].T)
            )
        elif how == "frozen":
            self.down.weight.data = self.up.weight.data.T
            self.requires_grad_(False)

    def forward(self, x):
        return self.down(self.up(x))


def check_one_memory():
    mesh, x = mesh_of(Grid(x=2)), torch.ones(2, 4)
    for how, names in (("tied by data", "down.weight"), ("a buffer", "kept"), ("columns", "down.weight")):
        model = OfOneMemory(how)
        with pytest.raises(
            LayoutError, match=rf"'up.weight' .* and '{names}' .* lie in one memory.*\n  fix: one param"
        ):
            ndtp.parallelize(model, mesh)
        assert "ndtp_report" not in vars(model) and type(model.up) is nn.Linear
    for how in ("parts", "columns apart", "frozen"):
        model = OfOneMemory(how)
        expected = model(x)
        torch.testing.assert_close(ndtp.parallelize(model, mesh, example=x)(x), expected)


def test_parameters_of_one_memory_are_refused(ranks):
    ranks(2).run(check_one_memory)


def check_no_padding():
    mesh, words = mesh_of(Grid(x=4)), []
    for plan, inner in (({"0": "up", "2": "down"}, 8), ({"0": "up", "2": "down"}, 6), (None, 6)):
        model = nn.Sequential(nn.Linear(4, inner), nn.ReLU(), nn.Linear(inner, 4))
        with pytest.raises(LayoutError) as error:
            ndtp.parallelize(model, mesh, plan, scheme="1d-sp", pad=False)(torch.ones(3, 4))
        words.append(str(error.value))
    return words


def test_without_padding_sizes_must_divide(ranks):
    messages = ranks(4).run(check_no_padding)
    assert all(m == messages[0] for m in messages) and all("fix" in each for each in messages[0])
    rows, _, inner = messages[0]
    assert "3" in rows and "0.weight (6, 4) is padded to (8, 4)" in inner
