"""Weights of layers that other code of the model computes, where ranks have rows of their own: gradients as dense ones.

A layer sums the gradient of its weight over the ranks, and so does what computes it.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch.func import functional_call

import ndtp
from ndtp import Grid


class Made(nn.Module):
    """A chain whose first layer has a weight, and whose last one a bias, of what `how` computes."""

    def __init__(self, how):
        super().__init__()
        self.how, self.chain = how, nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
        self.maker, self.code = nn.Linear(2, 63), nn.Parameter(torch.randn(2))
        self.a, self.b, self.scale = (nn.Parameter(torch.randn(*sizes)) for sizes in ((9, 2), (2, 7), (5,)))

    def weights(self, x):
        first, last = self.chain[0].weight, self.chain[2].bias
        if self.how == "layer":
            return {"0.weight": self.maker(self.code).view(9, 7)}
        if self.how == "adapter":
            return {"0.weight": first + self.a @ self.b, "2.bias": last * self.scale}
        if self.how == "mixed":
            own = {name: p * 1.5 for name, p in self.chain.named_parameters()}
            own["0.weight"] = own["0.weight"] + self.maker(self.code).view(9, 7)
            return own | {"2.bias": own["2.bias"] * self.scale}
        return {"0.weight": self.maker(x.mean(0)[:2]).view(9, 7)}  # of the rows of a rank

    def forward(self, x):
        if self.how == "function":
            return self.chain[2](torch.tanh(F.linear(x, self.maker(x.mean(0)[:2]).view(9, 7))))
        return functional_call(self.chain, self.weights(x), (x,)) + self.chain(x)


class Kinds(nn.Module):
    """A convolution, a norm, a table and a recurrent layer with computed weights."""

    def __init__(self, _):
        super().__init__()
        self.conv, self.norm, self.table = nn.Conv1d(7, 6, 1), nn.LayerNorm(6), nn.Embedding(5, 6)
        self.recurrent, self.head = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 5)
        self.maker, self.code = nn.Linear(2, 42 + 6 + 30 + 72), nn.Parameter(torch.randn(2))

    def forward(self, x):
        conv, norm, table, recurrent = self.maker(self.code).split([42, 6, 30, 72])
        y = functional_call(self.conv, {"weight": conv.view(6, 7, 1)}, (x[:, :, None].expand(-1, -1, 3),)).mT
        y = functional_call(self.norm, {"weight": norm}, (y,))
        y = y + functional_call(self.table, {"weight": table.view(5, 6)}, (torch.arange(3),))
        y = functional_call(self.recurrent, {"weight_ih_l0": recurrent.view(12, 6)}, (y,))[0]
        return self.head(y[:, -1])


def trained(model, rows, ranks):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = (torch.randn(8, n, generator=torch.Generator().manual_seed(step), dtype=torch.float64) for n in (7, 5))
        optimizer.zero_grad()
        (F.mse_loss(model(rows(x)), rows(y)) / ranks).backward()
        optimizer.step()
    whole = lambda x: x if x is None else x.full_tensor() if hasattr(x, "full_tensor") else x.detach()  # noqa: E731
    return {name: (whole(p), whole(p.grad)) for name, p in model.named_parameters()}


def check(kind, how, sizes):
    torch.manual_seed(0)
    dense, mesh = kind(how).double(), mesh_of(Grid(sizes))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh)
    mine = mesh.grid.coordinate(mesh.rank)["dp"]
    found = trained(model, lambda x: x.chunk(2)[mine], 2)
    if how == "function":  # of each rank's rows: the mean of two dense models that see one half each
        halves = [copy.deepcopy(dense) for _ in range(2)]
        for half, each in enumerate(halves):
            x, y = (torch.randn(8, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) for n in (7, 5))
            F.mse_loss(each(x.chunk(2)[half]), y.chunk(2)[half]).backward()
        for p, a, b in zip(dense.parameters(), *(each.parameters() for each in halves), strict=True):
            p.grad = None if a.grad is None else (a.grad + b.grad) / 2
        model.zero_grad()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh)
        (F.mse_loss(model(x.chunk(2)[mine]), y.chunk(2)[mine]) / 2).backward()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        return
    for name, (p, grad) in trained(dense, lambda x: x, 1).items():
        assert (grad is None) == (found[name][1] is None), name
        torch.testing.assert_close(found[name], (p, grad), msg=lambda text, name=name: f"{how}, {name}: {text}")


@pytest.mark.parametrize("how", ["layer", "adapter", "mixed", "function"])
def test_gradients_go_to_what_computes_a_weight(ranks, how):
    ranks(2).run(check, Made, how, {"dp": 2})


def test_and_of_layers_that_are_split(ranks):
    ranks(4).run(check, Made, "mixed", {"dp": 2, "x": 2})


def test_of_other_kinds_of_layers(ranks):
    ranks(2).run(check, Kinds, "layer", {"dp": 2})


def check_refused():
    with pytest.raises(ndtp.LayoutError, match=r"'chain.0': weight \(9, 7\) was computed, and ranks along dp have"):
        check(Made, "rows", {"dp": 2})


def test_weights_of_the_rows_of_a_rank_are_refused_by_name(ranks):
    ranks(2).run(check_refused)


def check_two_models():
    """One split model computes the weight of another one, in each of several steps."""
    found = []
    for is_split in (False, True):
        torch.manual_seed(0)
        pair = [nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)).double(), nn.Linear(4, 63).double()]
        if is_split:
            pair = [ndtp.parallelize(each, mesh_of(Grid(x=2))) for each in pair]
        model, maker = pair
        optimizer = torch.optim.SGD([p for each in pair for p in each.parameters()], lr=0.1)
        for step in range(2):
            x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad()
            weight = maker(torch.ones(1, 4, dtype=torch.float64)).view(9, 7)
            functional_call(model, {"0.weight": weight}, (x,)).square().mean().backward()
            optimizer.step()
        whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()  # noqa: E731
        found.append([whole(p) for each in pair for p in each.parameters()])
    torch.testing.assert_close(*found)


def test_a_model_that_computes_the_weight_of_another(ranks):
    ranks(2).run(check_two_models)


class Parametrized(nn.Module):
    """A layer whose weight is its own one beside a product of two, as adapters are put on."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(9, 2)), nn.Parameter(torch.randn(2, 7))

    def forward(self, weight):
        return weight + self.a @ self.b


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)).double()


def steps(model, rows, ranks, count=2, is_first=False):
    """Train with a penalty of all parameters.

    Args:
        is_first: whether the penalty is computed before the forward.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(count):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        of_forward = lambda x=x: model(rows(x)).square().mean()  # noqa: E731
        of_weights = lambda: 0.1 * sum(p.square().sum() for p in model.parameters())  # noqa: E731
        terms = [each() for each in ((of_weights, of_forward) if is_first else (of_forward, of_weights))]
        (sum(terms) / ranks).backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def check_put_on():
    """Norms and adapters that are put on after the split: a penalty in the first step, and a copy of the model."""
    mesh = mesh_of(Grid(dp=2))
    mine = mesh.coordinate["dp"]
    for put in (
        lambda model: nn.utils.parametrizations.weight_norm(model[0]),
        lambda model: nn.utils.parametrize.register_parametrization(model[0], "weight", Parametrized().double()),
    ):
        dense, model = chain(), ndtp.parallelize(chain(), mesh, example=torch.ones(2, 7).double())
        for each in (dense, model):
            torch.manual_seed(1)
            put(each)
        torch.testing.assert_close(steps(model, lambda x: x.chunk(2)[mine], 2), steps(dense, lambda x: x, 1))
        dense, model = copy.deepcopy(dense), copy.deepcopy(model)
        torch.testing.assert_close(steps(model, lambda x: x.chunk(2)[mine], 2), steps(dense, lambda x: x, 1))


def check_penalty_first():
    mesh = mesh_of(Grid(dp=2))
    dense, model = chain(), ndtp.parallelize(chain(), mesh, example=torch.ones(2, 7).double())
    for each in (dense, model):
        nn.utils.parametrizations.weight_norm(each[0])
    mine = mesh.coordinate["dp"]
    found = steps(model, lambda x: x.chunk(2)[mine], 2, is_first=True)
    torch.testing.assert_close(found, steps(dense, lambda x: x, 1, is_first=True))


def test_a_penalty_before_the_first_forward_behind_a_norm(ranks):
    ranks(2).run(check_penalty_first)


def test_what_is_put_on_beside_a_penalty_and_in_a_copy(ranks):
    ranks(2).run(check_put_on)


class Nearly(nn.Module):
    """A layer whose weight is, by a thousandth, of a rank's rows; or which is run again with a weight from before."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.maker, self.head, self.how = nn.Linear(7, 9), nn.Linear(2, 63), nn.Linear(9, 5), how

    def forward(self, x):
        if self.how == "rows":
            weight = self.layer.weight + 1e-3 * self.maker(x.mean(0)[:2]).view(9, 7)
            return self.head(functional_call(self.layer, {"weight": weight}, (x,)))
        weight = self.maker(torch.ones(2, dtype=x.dtype)).view(9, 7)
        run = lambda x, weight: functional_call(self.layer, {"weight": weight}, (x,))  # noqa: E731
        return self.head(torch.utils.checkpoint.checkpoint(run, x, weight, use_reentrant=True))


def check_named():
    mesh, x = mesh_of(Grid(dp=2)), torch.randn(8, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = x.chunk(2)[mesh.coordinate["dp"]]
    for how, said in (("rows", "ranks along dp have computed others"), ("again", r"\n  fix: checkpoint\(..., use_re")):
        torch.manual_seed(0)
        model = ndtp.parallelize(Nearly(how).double(), mesh, example=mine)
        with pytest.raises(ndtp.LayoutError, match=said):
            model(mine).square().sum().backward()
    dense, model = chain(), ndtp.parallelize(chain(), mesh, example=mine)
    found = []
    for each, rows in ((model, mine), (dense, x)):
        weight = each[0].weight * 1.5
        y = functional_call(each[0], {"weight": weight}, (rows,))
        grad = torch.autograd.grad(y.square().sum(), weight)[0]
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    torch.testing.assert_close(*found)


def test_what_cannot_be_right_is_named_and_the_weight_itself_has_its_gradient(ranks):
    ranks(2).run(check_named)
