"""Models of nothing but `Linear -> activation -> Linear`: the general rule splits them as any other."""

import copy

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from safetensors.torch import save
from torch import nn

import ndtp
from ndtp import Grid, LayoutError


class Between(nn.Module):
    """Its code does something between the layers."""

    def __init__(self, way):
        super().__init__()
        self.net, self.way = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6)), way

    def forward(self, x, other=None):
        return self.way(self.net, x)


WAYS = {
    "a norm": lambda net, x: net[2](F.layer_norm(net[0](x), (24,))),
    "parts": lambda net, x: net[2](torch.cat([net[0](x)[:, :12].relu(), net[0](x)[:, 12:]], -1)),
    "a constant": lambda net, x: net[2](net[0](x) + torch.arange(24.0, dtype=x.dtype)),
    "its mean": lambda net, x: net(x) + net[0](x).mean(),
    "one layer": lambda net, x: net[2](torch.cat([x] * 4, -1)),
    "weights": lambda net, x: F.linear(F.linear(x, net[0].weight, net[0].bias).relu(), net[2].weight),
}


def chosen(net, x):
    """Of each row the largest features, as a router has them: a write to what the ranks split."""
    largest, which = (y := net(x)).topk(2)
    return torch.full_like(y, -torch.inf).scatter_(1, which, largest).sigmoid().mul(y).sum()


class Physics(nn.Module):
    """Its own forward differentiates what its layers give."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x):
        x.requires_grad_()
        u = self.net(x)
        return torch.cat([u, torch.autograd.grad(u.sum(), x, create_graph=True)[0]], 1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, ids):
        return self.layer(self.table(ids))


class Target(nn.Module):
    """Its second net gets the weights of the first from time to time, and lies otherwise."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 4))
        self.target = copy.deepcopy(self.net)

    def forward(self, x, target=False):
        return (self.target if target else self.net)(x)


class ActorAndCritic(nn.Module):
    """Its code looks at numbers, so that the first call shows what it does; the critic's head stays whole."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = (nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, n)) for n in (4, 1))

    def forward(self, x):
        return torch.distributions.Normal(self.actor(x), 1.0).log_prob(torch.ones(4)).sum(-1), self.critic(x)


def check_autocast():
    dense, x = ActorAndCritic(), torch.linspace(-1, 1, 24).view(4, 6)
    for grid in (({"x": 2}, "1d"), ({"y": 2}, "2d")):
        model = split(dense, *grid)
        with torch.autocast("cpu", torch.bfloat16):
            outs = [[y.gathered() if hasattr(y, "gathered") else y for y in each(x)] for each in (model, dense)]
        torch.testing.assert_close(*outs, rtol=0.03, atol=0.03)  # dtypes, too


class Unused(nn.Module):
    """Projections of one input, of which the loss takes one."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        q, _, v = (layer(x).unflatten(-1, (3, 4)) for layer in (self.q, self.k, self.v))
        return self.o(q.relu().flatten(-2)), v.flatten(-2)


def check_unused():
    """Layers without a gradient have none, or weight decay moves them."""
    dense, x = Unused().double(), torch.linspace(-1, 1, 96).double().view(2, 4, 12)
    for grid in (({"x": 2}, "1d"), ({"z": 2}, "3d")):
        model, copied = split(dense, *grid), copy.deepcopy(dense)
        for each in (model, copied):
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5)
            for both in (False, True, False):
                out, v = each(x)
                (out.square().mean() + (v.square().mean() if both else 0.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for mine, expected in zip(model.parameters(), copied.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), expected)


def check_two_grids():
    """A teacher and a student, whose results lie otherwise on the ranks: the sizes of shards may agree all the same."""
    torch.manual_seed(0)
    dense, ids = [Encoder().double() for _ in range(2)], torch.arange(8)
    for other in (({"y": 2, "x": 2}, "2d"), ({"x": 4}, "1d"), ({"x": 4}, "1d-sp")):
        models = [split(each, *grid) for each, grid in zip(dense, (({"x": 2, "y": 2}, "2d"), other), strict=True)]
        for one, two in (models, dense):
            one.zero_grad(), two.zero_grad()
            (F.mse_loss(one(ids), two(ids)) + torch.cat([one(ids), two(ids)]).pow(3).mean()).backward()
        for mine, expected in zip(models, dense, strict=True):
            for p, q in zip(mine.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def check_same(name, models, call):
    losses = []
    for each in models:
        out = call(*each)
        losses.append((out.gathered() if hasattr(out, "gathered") else out).square().mean())
        losses[-1].backward()
    torch.testing.assert_close(*losses, msg=lambda m: f"{name}: {m}")
    for mine, dense in zip(*([p for m in each for p in m.parameters()] for each in models), strict=True):
        if dense.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), dense.grad, msg=lambda m: f"{name}: {m}")


def split(model, sizes, scheme):
    return ndtp.parallelize(copy.deepcopy(model), mesh_of(Grid(**sizes)), scheme=scheme)


def check_ways():
    torch.manual_seed(0)
    for i, (name, way) in enumerate(WAYS.items()):
        dense, x = Between(way).double(), torch.randn(4, 6).double()
        grid = (({"x": 2}, "1d"), ({"y": 2}, "2d"), ({"z": 2}, "3d"))[i % 3]
        check_same(name, [[split(dense, *grid)], [dense]], lambda model, x=x: model(x))
    dense, x = Physics().double(), torch.rand(8, 2).double()
    check_same("derivatives", [[split(dense, {"x": 2}, "1d")], [dense]], lambda model, x=x: model(x.clone()))
    parts = Encoder().double(), Between(lambda net, x: net(x)).double()
    for grid in (({"x": 2}, "1d-sp"), ({"y": 2}, "2d")):
        models = [split(each, *grid) for each in parts]
        for each in parts:
            each.zero_grad()
        check_same("two models", [models, parts], lambda one, two: two(one(torch.arange(6))))
    with pytest.raises(LayoutError, match=r"volume: Between has no config .*\n  fix: volume\(x="):
        models[1].ndtp_report.volume(4)
    assert models[1].ndtp_report.volume(x=torch.empty(4, 6, dtype=torch.double)).total > 0
    model, x = split(Between(chosen).double(), {"z": 2}, "3d"), torch.randn(4, 6).double()
    with ndtp.CommMeter() as meter:
        model(x).backward()
    assert "scatter" in str(model.ndtp_report.gathered) and model.ndtp_report.volume(x=x) == meter.volume
    target = Target().double()
    model = split(target, {"x": 2}, "1d")
    for each in (model, target):
        each(x).square().mean().backward()
        torch.optim.SGD(each.net.parameters(), 0.1).step()
        each.target.load_state_dict(each.net.state_dict())
    torch.testing.assert_close(model(x, target=True) * 1.0, target(x, target=True))
    with pytest.raises(LayoutError, match=r"the memory of net.0.weight \(24, 6\)\n  fix: ndtp.checkpoint"):
        save(models[1].state_dict())


def test_whatever_code_does_between_two_layers(ranks):
    ranks(2).run(check_ways)
    ranks(2).run(check_autocast)
    ranks(2).run(check_unused)


def test_two_models_on_two_grids(ranks):
    ranks(4).run(check_two_grids)
