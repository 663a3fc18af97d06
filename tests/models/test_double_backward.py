"""`double_backward=True`: Hessians, meta-learning and optimizers of second order, as people write them."""

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch.func import functional_call

import ndtp
from ndtp import Grid


def classifier():
    """Features that ranks do not divide."""
    layers = nn.Linear(8, 35), nn.GELU(), nn.LayerNorm(35), nn.Linear(35, 20), nn.Tanh(), nn.Linear(20, 9)
    return nn.Sequential(*layers)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places, self.norm = nn.Embedding(64, 32), nn.Parameter(torch.randn(8, 32)), nn.LayerNorm(32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)

    def forward(self, ids):
        x = self.table(ids) + self.places
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, 8).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return self.head(x + self.out(y.transpose(1, 2).reshape(b, t, c)))


def stock():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def of_classes(model, x):
    weights = torch.linspace(0.5, 2, 9).double()
    target = torch.arange(len(x)) % 9
    target[0] = -100
    return F.cross_entropy(model(x), target, weights, label_smoothing=0.1, reduction="sum")


def of_tokens(model, ids):
    return F.cross_entropy(model(ids).view(-1, 64), (ids * 3 % 64).view(-1), reduction="sum")


CASES = {
    "classifier": (classifier, of_classes, torch.linspace(-1, 1, 64).double().view(8, 8), 1e-9),
    "language": (Language, of_tokens, torch.arange(32).view(4, 8), 1e-9),
    # Its norms and its softmax compute in fp32; its loss is a mean, which is one of all rows of the grid.
    "stock": (stock, lambda m, ids: m(input_ids=ids, labels=ids).loss, torch.arange(32).view(4, 8), 1e-5),
}


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def curvature(model, loss):
    """The gradient, and the Hessian times a vector of each parameter's size, which every rank has whole."""
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    vectors = [torch.linspace(-1, 2, p.numel()).double().view(p.shape) for p in parameters]
    along = sum((slope * vector).sum() for slope, vector in zip(slopes, vectors, strict=True))
    return slopes, torch.autograd.grad(along, parameters)


def check_hessian(grid, name):
    mesh, (kind, loss, x, tolerance) = mesh_of(grid), CASES[name]
    dense, model = made(kind), ndtp.parallelize(made(kind), mesh, double_backward=True)
    expected, found = curvature(dense, loss(dense, x)), curvature(model, loss(model, x))
    for theirs, ours in zip(expected, found, strict=True):
        for (key, _), a, b in zip(dense.named_parameters(), theirs, ours, strict=True):
            torch.testing.assert_close(b.full_tensor(), a, msg=key, rtol=tolerance, atol=tolerance)
    assert len(set(model.ndtp_report.linears)) == 1, model.ndtp_report


@pytest.mark.parametrize("name", ["classifier", "language"])
@pytest.mark.parametrize("grid", [Grid(x=2, y=2), Grid(z=2, y=2)], ids=str)
def test_hessians_are_those_of_the_dense_model(ranks, grid, name):
    ranks(4).run(check_hessian, grid, name)


def test_hessians_of_a_stock_model(ranks):
    ranks(4).run(check_hessian, Grid(x=2, y=2), "stock")


def check_rows():
    """What ranks with rows of their own make of a sum counts for each of them, and nobody knows what for."""
    mesh = mesh_of(Grid(dp=2))
    for kind, loss, x, _ in CASES.values():
        model = ndtp.parallelize(made(kind), mesh, double_backward=True)
        mine = loss(model, x.chunk(2)[mesh.coordinate["dp"]])
        with pytest.raises(ndtp.LayoutError, match=r"summed over dp, and sums over ranks .*\n  fix: z in"):
            torch.autograd.grad(mine, list(model.parameters()), create_graph=True)


def test_sums_over_dp_are_refused(ranks):
    ranks(2).run(check_rows)


def learned(model):
    """Finn et al. 2017, "Model-agnostic meta-learning": two steps on one task, and the loss of another."""
    x = torch.linspace(-1, 1, 64).double().view(8, 8)
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = F.cross_entropy(functional_call(model, weights, (x,)), torch.arange(8))
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {key: p - 0.1 * slope for (key, p), slope in zip(weights.items(), slopes, strict=True)}
    F.cross_entropy(functional_call(model, weights, (x.flip(0),)), torch.arange(8).roll(2)).backward()


def of_second_order(model):
    """Steps by the diagonal of the Hessian, as Yao et al. 2021, "AdaHessian", estimate it."""
    parameters = list(model.parameters())
    for step in range(3):
        x = torch.linspace(-1, 1 + step, 64).double().view(8, 8)
        model.zero_grad()
        F.cross_entropy(model(x), torch.arange(8)).backward(create_graph=True)
        vectors = [torch.ones_like(p) for p in parameters]
        slopes = [p.grad for p in parameters]
        curved = torch.autograd.grad(slopes, parameters, grad_outputs=vectors)
        with torch.no_grad():
            for p, slope, h in zip(parameters, slopes, curved, strict=True):
                p -= 0.1 * slope / (h.abs() + 0.1)


def check_trained(train):
    dense, model = made(classifier), ndtp.parallelize(made(classifier), mesh_of(Grid(x=2)), double_backward=True)
    train(dense)
    train(model)
    for (key, a), b in zip(dense.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.full_tensor(), a, msg=key)
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, msg=key)


@pytest.mark.parametrize("train", [learned, of_second_order])
def test_training_by_second_derivatives(ranks, train):
    ranks(2).run(check_trained, train)


def check_refused():
    mesh, x = mesh_of(Grid(x=2)), torch.ones(2, 8)
    loss = ndtp.parallelize(classifier(), mesh)(x).sum()
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again.*\n  fix: .*double_backward=True"):
        loss.backward(create_graph=True)
    with pytest.raises(ndtp.LayoutError, match=r"double_backward=True.*pairs.*\n  fix: a plan that names schemes"):
        ndtp.parallelize(classifier(), mesh, {"0": "up", "3": "down"}, double_backward=True)


def check_on_one_rank():
    """An option that one rank alone is given, by which its layers would send something else."""
    x = torch.ones(4, 8)
    for key, value in {"double_backward": True, "fuse": False, "chunks": 2}.items():
        mesh = mesh_of(Grid(x=2))
        model = ndtp.parallelize(classifier(), mesh, **({key: value} if mesh.rank else {}))
        with pytest.raises(ndtp.MismatchError, match=rf"how it was split: .*'3d, {key}={value}'.*\n  fix: parallelize"):
            model(x)


def test_an_option_of_one_rank_alone_is_named(ranks):
    ranks(2).run(check_on_one_rank)


def test_without_it_the_fix_is_named(ranks):
    ranks(2).run(check_refused)
