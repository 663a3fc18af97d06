"""Weights that a model's forward changes for one call of a layer, and changes back before it uses what that gave."""

import copy

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch.func import functional_call

import ndtp
from ndtp import Grid

SHAPES = {"t": (16, 16), "up": (32, 16), "k": (16, 16), "head": (24, 16)}


class Model(nn.Module):
    """A table, a chain of layers, an MLP, projections of one input, and a head with its loss."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(24, 16), nn.LayerNorm(16)
        self.first, self.t, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 24, bias=False)
        self.noise = nn.ParameterDict({name: torch.randn(shape) for name, shape in SHAPES.items()})

    def call(self, name, x):
        layer, noise = getattr(self, name), self.noise[name]
        if name != self.changed:
            return layer(x)
        if self.how == "noise":
            with torch.no_grad():
                layer.weight.add_(noise)
            y = layer(x)
            with torch.no_grad():
                layer.weight.sub_(noise)
        elif self.how == "data":
            before = layer.weight.data
            layer.weight.data = before + noise
            y = layer(x)
            layer.weight.data = before
        elif self.how == "added to data":
            layer.weight.data.add_(noise.detach())
            y = layer(x)
            layer.weight.data.sub_(noise.detach())
        elif self.how == "attribute":
            own = layer._parameters.pop("weight")
            layer.weight = own * 1.5
            y = layer(x)
            del layer.weight
            layer.weight = own
        elif self.how == "other":
            y = functional_call(layer, {"weight": noise * 1}, (x,))
        else:
            own = [*layer.parameters()]
            for p in own:
                p.requires_grad_(self.how == "thawed")
            y = layer(x)
            for p in own:
                p.requires_grad_(self.how == "frozen")
        return y

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.last(torch.relu(self.call("t", torch.tanh(self.first(x)))))
        x = x + self.down(F.gelu(self.call("up", self.norm(x))))
        q, k, v = self.q(x), self.call("k", x), self.v(x)
        x = x + torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        return F.cross_entropy(self.call("head", x).flatten(0, 1), ids.flatten())


def result(model, ids):
    """The loss, and the gradients by name; none of what noise is added to, of which torch refuses the gradient."""
    if model.how == "thawed":
        for p in getattr(model, model.changed).parameters():
            p.requires_grad_(False)
    if model.how in ("noise", "data", "added to data"):
        with torch.no_grad():
            return {"loss": model(ids)}
    loss = model(ids)
    loss.backward()
    whole = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # noqa: E731
    return {"loss": loss.detach()} | {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}


def check(sizes, how, names):
    mesh, ids = mesh_of(Grid(sizes)), torch.arange(24).view(4, 6)
    for name in names:
        made = []
        for _ in range(2):
            torch.manual_seed(0)
            model = Model().double()
            model.how, model.changed = how, name
            made.append(model)
        dense, model = made
        plain = ndtp.parallelize(made[1], mesh)
        for again in range(3):
            dense.zero_grad(), plain.zero_grad()
            if again == 2:  # other memory in the place of that which the calls before have seen
                dense.float(), plain.float()
            expected, found = result(dense, ids), result(plain, ids)
            for key, value in expected.items():
                where = f"{how} of '{name}', call {again}: {key}"
                assert (value is None) == (found[key] is None), where
                if value is not None:
                    torch.testing.assert_close(found[key], value, msg=lambda text, where=where: f"{where}: {text}")


def test_noise_for_one_call(ranks):
    ranks(4).run(check, {"x": 2, "y": 2}, "noise", tuple(SHAPES))
    ranks(2).run(check, {"z": 2}, "data", tuple(SHAPES))

    ranks(2).run(check, {"x": 2}, "added to data", ("t", "k", "up"))


def test_other_weights_for_one_call(ranks):
    ranks(4).run(check, {"x": 2, "y": 2}, "other", tuple(SHAPES))
    ranks(2).run(check, {"y": 2}, "attribute", tuple(SHAPES))


def test_frozen_for_one_call(ranks):
    ranks(4).run(check, {"x": 2, "y": 2}, "frozen", tuple(SHAPES))
    ranks(2).run(check, {"z": 2}, "thawed", tuple(SHAPES))


class Affine(nn.Module):
    """A matrix and a bias that no layer has."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 4) / 8), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x @ self.weight + self.bias


class OfSamples(nn.Module):
    """Each sample has weights of its own: of a matrix and a bias that code reads, and of a layer on the grid."""

    def __init__(self, how):
        super().__init__()
        self.first, self.makes, self.how = nn.Linear(6, 8), nn.Linear(8, 32), how
        self.given = Affine()
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        if self.how == "layer":
            return functional_call(self.last, {"weight": x[0]}, (x,))
        if self.how == "computed":
            own = {"weight": self.makes(x.mean(1)).view(-1, 8, 4), "bias": x[..., :1]}
        else:
            own = {name: p.unsqueeze(0).expand(2, *p.shape) for name, p in self.given.named_parameters()}
            own["bias"] = own["bias"].unsqueeze(1)
        return self.last(torch.tanh(functional_call(self.given, own, (x,))) @ x[..., :4].mT @ x)


def check_samples(sizes):
    mesh = mesh_of(Grid(sizes))
    x = torch.linspace(-1, 1, 4 * 5 * 6, dtype=torch.float64).view(4, 5, 6).sin()
    halves = x.chunk(2)
    for how in ("computed", "expanded"):
        torch.manual_seed(0)
        dense = OfSamples(how).double()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh)
        loss = model(halves[mesh.rank if "dp" in sizes else 0]).square().sum()
        if how == "computed" and "dp" in sizes:  # of rows of this rank's own
            with pytest.raises(ndtp.LayoutError, match="ranks along dp have computed others"):
                loss.backward()
            continue
        loss.backward()
        for part in halves if "dp" in sizes else halves[:1]:
            dense(part).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{how}: {name}"
            if q.grad is not None:
                torch.testing.assert_close(whole_of(p.grad), q.grad, msg=lambda text, n=f"{how} {name}": f"{n}: {text}")
    torch.manual_seed(0)
    model = ndtp.parallelize(OfSamples("layer").double(), mesh)
    says = r"'last.weight' is \(4, 8\), split over ranks, and a tensor \(5, 8\)"
    with pytest.raises(ndtp.LayoutError, match=says + r"[^\n]*\n  fix: [^\n]*keep=\['last'\]"):
        model(halves[0])


@pytest.mark.parametrize("sizes", [{"x": 2}, {"dp": 2}], ids=str)
def test_weights_of_other_sizes_for_one_call(ranks, sizes):
    ranks(2).run(check_samples, sizes)


def swaps(model, x):
    """What trainers do with `.data`, which gives a parameter other memory: an average, and two layers that change."""
    before = {name: p.data for name, p in model.named_parameters()}
    average = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    seen = [model(x).sum()]
    for name, p in model.named_parameters():
        p.data = average[name]
    seen.append(model(x).sum())
    average["1.weight"].mul_(3)  # the parameter lies in its memory
    seen.append(model(x).sum())
    for name, p in model.named_parameters():
        p.data = before[name]
    seen.append(model(x).sum())
    first, last = model[0].weight, model[2].weight
    first.data, last.data = last.data, first.data
    seen.append(model(x).sum())
    kept = first.data
    first.data = torch.ones_like(x)[:1].expand(first.shape)
    seen += [model(x).sum(), whole_of(kept).sum()]
    seen[-2].backward()
    return torch.stack([*seen, *(whole_of(p.grad).sum() for p in model.parameters())])


def whole_of(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def check_swaps(sizes):
    x = torch.linspace(-1, 1, 6 * 5, dtype=torch.float64).view(6, 5)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]).double()
    expected = swaps(copy.deepcopy(model), x)
    torch.testing.assert_close(swaps(ndtp.parallelize(model, mesh_of(Grid(sizes)), example=x), x), expected)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"z": 2}], ids=str)
def test_other_memory_leaves_the_numbers_of_before_to_who_has_them(ranks, sizes):
    ranks(2).run(check_swaps, sizes)


class Given(nn.Module):
    """A layer whose weight is given other memory in a forward: of a tensor that lies alike, or otherwise."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(6, 6), nn.Linear(6, 6), how

    def forward(self, x):
        weight = self.first.weight
        before = weight.data
        if self.how == "alike":
            self.first.weight.data = before * 2
        elif self.how == "transposed":
            self.first.weight.data = before.t()
        elif self.how == "plain":
            self.first.weight.data = torch.eye(6, dtype=x.dtype)
        elif self.how == "another":
            self.first.weight.data = self.second.weight.data
        y = F.linear(self.second(x), weight)  # it was read before, and is the parameter
        self.first.weight.data = before
        return y + F.linear(x, weight)


def check_given(sizes):
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    for how in ("alike", "transposed", "plain", "another"):
        torch.manual_seed(0)
        dense = Given(how).double()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(sizes)), example=x)
        with torch.no_grad():
            for _ in range(2):
                found, expected = model(x), dense(x)
                torch.testing.assert_close(whole_of(found), expected, msg=lambda text, how=how: f"{how}: {text}")
        torch.testing.assert_close(whole_of(model.first.weight), dense.first.weight)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"z": 2}, {"y": 2}], ids=str)
def test_other_memory_in_a_forward_is_that_of_the_parameter(ranks, sizes):
    ranks(2).run(check_given, sizes)


def check_teacher():
    """The weights that a forward had come back before its backward: with their own memory, not with other."""
    torch.manual_seed(0)
    dense, x = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)).double(), torch.ones(4, 8).double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), example=x)
    for each in (dense, model):
        average, y = [p.detach() * 0.5 for p in each.parameters()], each(x)
        before = [p.data for p in each.parameters()]
        for p, value in zip(each.parameters(), average, strict=True):
            p.data = value
        with torch.no_grad():
            other = each(x)
        for p, value in zip(each.parameters(), before, strict=True):
            p.data = value
        (y - other).square().mean().backward()
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(whole_of(p.grad), q.grad)
    y = model(x)
    model[2].weight.data = model[2].weight.data * 2
    with pytest.raises(RuntimeError, match="has other memory since"):
        y.sum().backward()


def test_weights_that_come_back_before_backward(ranks):
    ranks(2).run(check_teacher)


def check_shared():
    """A parameter has its part of a dense tensor, and not its memory: a later write to that is refused by name."""
    x = torch.ones(2, 4)
    model = ndtp.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), mesh_of(Grid(x=2)), example=x)
    flat = torch.zeros(32)
    model[0].weight.data = flat[:].view(8, 4)
    model(x)
    flat.add_(1)
    with pytest.raises(ndtp.LayoutError, match=r"'0.weight' \(8, 4\) was given a tensor that was written to since"):
        model(x)
    model[0].weight.data = flat.view(8, 4)
    model(x)
    model[0].weight.data = model[0].weight.data * 2
    flat.add_(1)
    model(x)
    with pytest.raises(ndtp.LayoutError, match=r"sizes or memory in place\n  fix: p\.data = other"):
        model[0].weight.data.set_(model[0].weight.data)


def test_a_write_behind_what_a_parameter_was_given_is_refused(ranks):
    ranks(2).run(check_shared)
