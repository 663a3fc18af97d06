"""Code outside of a model's forward computes with its parameters and layers, where ranks have rows of their own."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from small_models import IDS, build
from torch import nn
from torch.distributed.tensor import Replicate
from torch.nn.utils import parametrizations, prune

import ndtp
from ndtp import Grid, LayoutError

GRIDS = [({"dp": 2}, "1d"), ({"dp": 2, "x": 2}, "1d-sp"), ({"dp": 2, "x": 2, "y": 2}, "2d")]


class Net(nn.Module):
    """A vision model as timm has them: an embedding of places, features, and a head."""

    def __init__(self):
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 4, 16))
        self.up, self.down, self.norm = nn.Linear(16, 33), nn.Linear(33, 16), nn.LayerNorm(16)
        self.head, self.scale = nn.Linear(16, 10), nn.Parameter(torch.randn(16))
        self.prototypes, self.gain = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.tensor(1.5))

    def forward_features(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        return self.norm(x + self.down(self.up(x).relu()))

    def forward_head(self, x):
        return self.head(x.mean(1)) * self.gain

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def penalty(model, p=2):
    return sum(each.abs().pow(p).sum() for each in model.parameters())


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def everywhere(x):
    if not hasattr(x, "redistribute"):
        return x
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()


LOSSES = {
    "a penalty of all parameters": lambda m, x: m(x).square().mean() + penalty(m),
    "a penalty of split weights": lambda m, x: m(x).square().mean() + m.up.weight.norm() + m.down.weight.abs().mean(),
    "scaled by parameters": lambda m, x: (m(x) / m.scale.norm() * m.up.weight.square().mean()).square().mean(),
    "a whole parameter": lambda m, x: (m(x) * whole(m.prototypes).mean()).square().mean(),
    "a parameter laid otherwise": lambda m, x: m(x).square().mean() + everywhere(m.down.bias).square().sum(),
    "methods": lambda m, x: m.forward_head(m.forward_features(x) * m.scale).square().mean(),
    "prototypes": lambda m, x: F.cosine_similarity(
        m.forward_features(x).mean(1)[:, None], m.prototypes[None], dim=-1
    ).square().mean(),
    "a read weight": lambda m, x: F.linear(m.forward_features(x).mean(1), m.head.weight).square().mean(),
}  # fmt: skip


def check_losses(sizes, scheme):
    mesh, x = mesh_of(Grid(**sizes)), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    mine = x.chunk(2)[mesh.coordinate["dp"]]
    for name, loss in LOSSES.items():
        torch.manual_seed(0)
        dense = Net().double()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme, example=x)
        same = partial(torch.testing.assert_close, msg=lambda m, name=name: f"{name}: {m}")
        steps = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, dense)]
        for _ in range(3):
            of_rows, of_all = loss(model, mine) / 2, loss(dense, x)
            of_rows.backward(retain_graph=True)
            of_all.backward(retain_graph=True)
            for (key, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (name, key)
                if q.grad is not None:
                    same(whole(p.grad), q.grad)
            for m, given in ((model, of_rows), (dense, of_all)):
                parameters = [p for p in m.parameters() if p.grad is not None]
                m.asked = torch.autograd.grad(given, parameters)
            for one, other in zip(model.asked, dense.asked, strict=True):
                same(whole(one), other)
            for each in steps:
                each.step()
                each.zero_grad()
        with torch.no_grad():
            same(loss(model, x), loss(dense, x))
    with pytest.raises(LayoutError, match="sums over ranks have no second derivative"):
        torch.autograd.grad(penalty(model), model.up.weight, create_graph=True)


def check_other_ends(sizes, scheme):
    """Gradients that end elsewhere than in a backward of eager layers."""
    mesh, x = mesh_of(Grid(**sizes)), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    mine = x.chunk(2)[mesh.coordinate["dp"]]
    torch.manual_seed(0)
    dense = Net().double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme, example=x)
    for _ in range(2):
        with mesh.accumulate():
            ((model(mine).square().mean() + penalty(model)) / 2).backward()
        (dense(x).square().mean() + penalty(dense)).backward()
    mesh.reduce_gradients()
    same_gradients(model, dense)
    model, again = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme, example=x), dense
    for change in (
        lambda m: m.float().double(),
        lambda m: m,
        lambda m: m.float().double(),
        copy.deepcopy,
    ):  # moved before and after it is read
        model, again = change(model), change(again)
        for with_penalty in (0, 1):
            for m, given, count in ((model, mine, 2), (again, x, 1)):
                m.zero_grad()
                loss = m(given).square().mean() + (penalty(m) if with_penalty else 0)
                (loss / count).backward()
            same_gradients(model, again)


def same_gradients(model, dense):
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(whole(p.grad), q.grad)


def test_gradients_that_end_elsewhere(ranks):
    ranks(4).run(check_other_ends, {"dp": 2, "x": 2}, "1d-sp")


def check_compiled():
    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    ndtp.parallelize(pair, mesh_of(Grid(dp=2)), {"0": "up", "2": "down"}, scheme="1d")
    compiled = torch.compile(pair, backend="aot_eager")
    with pytest.raises(LayoutError, match=r"gets gradients of a compiled layer.* and of code outside of it"):
        (compiled(torch.randn(4, 16)).square().mean() + penalty(pair)).backward()


def test_a_penalty_beside_a_compiled_model(ranks):
    ranks(2).run(check_compiled)


@pytest.mark.parametrize(("sizes", "scheme"), GRIDS, ids=str)
def test_gradients_are_those_of_all_rows(ranks, sizes, scheme):
    ranks(2 ** len(sizes)).run(check_losses, sizes, scheme)


READ = ("lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.norm")


@pytest.mark.filterwarnings("ignore")
def check_read_in_forward(axes):
    """The forward of a subclass of a stock model computes with weights of its layers."""
    transformers = pytest.importorskip("transformers")

    class Penalised(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            given = super().forward(*args, **kwargs)
            of_rows = given.logits.square().mean()
            given["loss"] = given.loss + sum(
                (self.get_submodule(each).weight * of_rows).square().sum() for each in READ
            )
            return given

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense = Penalised(transformers.LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes)).double()
    mesh, ids = mesh_of(Grid(**axes)), torch.randint(50, (4, 8))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh)
    for _ in range(2):
        for rows in ids.chunk(2):
            (dense(input_ids=rows, labels=rows).loss / 2).backward()
        rows = ids.chunk(2)[mesh.coordinate["dp"]]
        model(input_ids=rows, labels=rows).loss.backward()
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "x": 2}, {"dp": 2, "z": 2}], ids=str)
def test_weights_that_a_forward_reads(ranks, axes):
    ranks(2 ** len(axes)).run(check_read_in_forward, axes)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.3)


PUT_ON = {
    "pruning": pruned,
    "pruning of several": lambda layer: prune.global_unstructured(
        [(layer, "weight")], prune.L1Unstructured, amount=0.3
    ),
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": torch.nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
}


@pytest.mark.filterwarnings("ignore")
def check_put_on():
    """Norms and pruning compute the weight once as they are put on, and then in each forward."""
    mesh, x = mesh_of(Grid(dp=2)), torch.randn(4, 16, dtype=torch.float64)
    for name, put_on in PUT_ON.items():
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, example=x)
        for net, rows in ((dense, x), (model, x.chunk(2)[mesh.coordinate["dp"]])):
            torch.manual_seed(1)
            put_on(net[0])
            for _ in range(2):
                net(rows).square().mean().backward()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor() / 2, q.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_norms_and_pruning_where_ranks_have_rows_of_their_own(ranks):
    ranks(2).run(check_put_on)


def check_waiting(sizes):
    """Methods of a model that nobody has called, behind a use of a parameter: each rank would train its own."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 8, 8)
    ndtp.parallelize(model, mesh_of(Grid(**sizes)), scheme="1d")
    assert "waits" in str(model.ndtp_report)
    shifted = model.pos + 1.0
    loss = model.forward_head(model.forward_features(x)).square().mean() + shifted.square().mean()
    if "dp" in sizes:
        with pytest.raises(LayoutError, match=r"Net waits for its first call, and '.*' gets a gradient before it"):
            loss.backward()
    else:
        with pytest.warns(UserWarning, match=r"Net waits for its first call.*\n  fix: parallelize\(..., example=...\)"):
            loss.backward()
    del loss, shifted
    model.zero_grad()
    model(x).square().mean().backward()
    assert "waits" not in str(model.ndtp_report) and not model.up.weight._backward_hooks


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"x": 2}], ids=str)
def test_what_runs_before_the_first_call(ranks, sizes):
    ranks(2).run(check_waiting, sizes)


TWICE = {
    "a product": lambda w, x: (x @ w.t()).pow(3).mean(),
    "a layer's function": lambda w, x: F.linear(x, w).tanh().sum(),
    "a mask": lambda w, x: (w * torch.linspace(0, 1, w.numel()).double().view(w.shape)).pow(3).mean(),
    "a row": lambda w, x: w[1].pow(3).sum(),
    "parts": lambda w, x: torch.cat([w, x]).pow(3).sum(),
    "a loss": lambda w, x: F.mse_loss(w, torch.ones(w.shape).double()).pow(2),
    "elsewhere": lambda w, x: everywhere(w).pow(3).sum(),
    "whole": lambda w, x: (x @ whole(w).t()).pow(3).mean(),
}


def check_derivatives():
    """Second and third ones of parameters, as a hand-written MAML or a Hessian-vector product takes them."""
    dense, x = nn.Sequential(nn.Linear(3, 5)).double(), torch.linspace(-1, 1, 18).double().view(6, 3)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", example=x)
    for name, loss in TWICE.items():
        found = []
        for w in (model[0].weight, dense[0].weight):
            first = torch.autograd.grad(loss(w, x), w, create_graph=True)[0]
            second = torch.autograd.grad(first.pow(2).sum(), w, create_graph=True)[0]
            found.append([whole(g) for g in (first, second, *torch.autograd.grad(second.pow(2).sum(), w))])
        torch.testing.assert_close(*found, msg=lambda m, name=name: f"{name}: {m}")


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.layer(x) * self.shift


def check_penalties_of_gradients():
    """Gradients of a parameter of the model's own code, behind which no product is."""
    x = torch.linspace(-1, 1, 48).double().view(6, 8)
    for sizes, scheme in (({"x": 2}, "1d"), ({"z": 2}, "3d")):
        dense = Shifted().double()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(**sizes)), scheme=scheme, example=x)
        for each in (dense, model):
            loss = each(x).pow(3).sum()
            (found,) = torch.autograd.grad(loss, [each.shift], create_graph=True)
            (loss + found.pow(2).sum()).backward()
        for mine, expected in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), expected.grad)


def test_parameters_are_differentiated_again(ranks):
    ranks(2).run(check_penalties_of_gradients)
    ranks(2).run(check_derivatives)


def check_computed_outside():
    """Weights that code computes before it calls the model, where layers sum gradients over rows, too."""
    torch.manual_seed(0)
    mesh, dense, x = mesh_of(Grid(dp=2)), Shifted().double(), torch.linspace(-1, 1, 64).double().view(8, 8)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d", example=x)
    mine = x.chunk(2)[mesh.coordinate["dp"]]
    found = []
    for each, rows in ((model, mine), (dense, x)):
        half = {name: p * 0.5 for name, p in each.named_parameters()}
        torch.func.functional_call(each, half, (rows,)).square().sum().backward()
        other = {name: (p.detach() * 0.5).requires_grad_() for name, p in each.named_parameters()}
        torch.func.functional_call(each, other, (rows,)).square().sum().backward()
        found.append([whole(p.grad) for p in (*each.parameters(), *other.values())])
    torch.testing.assert_close(*found)


def test_weights_computed_outside_of_a_forward(ranks):
    ranks(2).run(check_computed_outside)


def check_beside_the_mean_of_all(sizes):
    """The loss of a stock model along dp is divided by nothing; a warning says that terms of weights are."""
    mesh = mesh_of(Grid(**sizes))
    dense, model = build("llama"), ndtp.parallelize(build("llama"), mesh, scheme="1d")
    mine, said = IDS.chunk(2)[mesh.coordinate["dp"]], []
    for step in range(3):  # the penalty before the loss, behind it, and by itself
        model.zero_grad()
        dense.zero_grad()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model(mine, labels=mine).loss.backward()
            with torch.no_grad():
                penalty(model)  # a number for a log
            assert not [each for each in told if "as a penalty" in str(each.message)] or step
            model.zero_grad()
            term = penalty(model) / 2
            loss = model(mine, labels=mine).loss
            (term if step == 2 else term + loss if step else loss + term).backward()
        said += [str(each.message) for each in told if "as a penalty" in str(each.message)]
        (penalty(dense) + (0 if step == 2 else dense(IDS, labels=IDS).loss)).backward()
        same_gradients(model, dense)
    assert len(said) == 1 and "along dp" in said[0] and "divide such a term by 2, loss + term / 2" in said[0], said


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "x": 2}], ids=str)
def test_a_penalty_beside_the_mean_of_all_rows_is_warned_of(ranks, sizes):
    pytest.importorskip("transformers")
    ranks(2 * sizes.get("x", 1)).run(check_beside_the_mean_of_all, sizes)
