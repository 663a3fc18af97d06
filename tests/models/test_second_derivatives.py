"""Gradients that are differentiated again: penalties on gradients, equations, forces; as people write them."""

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import CommMeter, Grid


class Critic(nn.Module):
    """A critic of a Wasserstein GAN, with a norm and a layer of one feature."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down, self.score = (
            nn.Linear(6, 36),
            nn.LayerNorm(36),
            nn.Linear(36, 24),
            nn.Linear(24, 1),
        )

    def forward(self, x):
        return self.score(nn.functional.leaky_relu(self.down(torch.tanh(self.norm(self.up(x)))), 0.2))


class Field(nn.Module):
    """Without a layer norm, of which torch's own third derivative is wrong."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(6, 32), nn.RMSNorm(32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 1)
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class Forces(nn.Module):
    """An energy and its forces, which the loss has both."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(6, 32), nn.SiLU(), nn.RMSNorm(32), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
        )

    def forward(self, at):
        at = at.detach().requires_grad_()
        energy = self.energy(at).sum(-1)
        (slope,) = torch.autograd.grad(energy.sum(), at, create_graph=True)
        return energy, -slope


def penalty(critic, x):
    """Gulrajani et al. 2017, "Improved training of Wasserstein GANs"."""
    x = x.clone().requires_grad_()
    score = critic(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()


def equation(net, x):
    """Burgers' equation, as a physics-informed network learns it."""
    x = x.clone().requires_grad_()
    u = net(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]).square().mean()


def heat(net, x):
    """The heat equation, whose network is given what code outside has joined of leaves."""
    place, time = x[:, :1].clone().requires_grad_(), x[:, 1:].clone().requires_grad_()
    u = net(torch.cat([2 * place - 1, time], dim=1))
    (first,) = torch.autograd.grad(u.sum(), place, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), place, create_graph=True)
    (later,) = torch.autograd.grad(u.sum(), time, create_graph=True)
    return (later[:, 0] - second[:, 0] + u[:, 0]).square().mean()


def forces(model, x):
    energy, force = model(x)
    return energy.square().mean() + force.square().mean()


CASES = {"penalty": (Critic, penalty), "equation": (Field, equation), "forces": (Forces, forces), "heat": (Field, heat)}


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def check(grid, name):
    mesh, (kind, loss) = mesh_of(grid), CASES[name]
    dense, model = made(kind), ndtp.parallelize(made(kind), mesh)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dp = grid["dp"] if "dp" in grid else 1
    mine = x.chunk(dp)[mesh.coordinate["dp"]] if dp > 1 else x
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (dense, model)]
    for _ in range(3):
        for each, given, parts, optimizer in zip((dense, model), (x, mine), (1, dp), optimizers, strict=True):
            optimizer.zero_grad()
            (loss(each, given) / parts).backward()
        for (key, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=key)
        for optimizer in optimizers:
            optimizer.step()
    assert len(model.ndtp_report.replaced) >= 2, model.ndtp_report


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grid", [Grid(x=2, y=2), Grid(dp=2, x=2), Grid(z=2, y=2)], ids=str)
def test_gradients_of_gradients_are_those_of_the_dense_model(ranks, grid, name):
    ranks(4).run(check, grid, name)


def check_volume():
    """The bytes of a call with such an input are what the report says of one."""
    model = ndtp.parallelize(made(Critic), mesh_of(Grid(x=2, y=2)))
    x = torch.ones(8, 6, dtype=torch.float64, requires_grad=True)
    model(x)  # the first call compares weights
    with CommMeter() as meter:
        model(x).sum().backward()
    assert meter.volume == model.ndtp_report.volume(x=x) == model.ndtp_report.volume(x)
    assert meter.volume != model.ndtp_report.volume(x=x.detach())


def test_bytes_are_counted(ranks):
    ranks(4).run(check_volume)


def check_named():
    model = ndtp.parallelize(made(Critic), mesh_of(Grid(x=2)))
    loss = model(torch.ones(4, 6, dtype=torch.float64)).sum()
    with pytest.raises(RuntimeError, match=r"(?s)cannot be differentiated again.*fix: .*requires_grad_"):
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ndtp.MismatchError, match=r"leaf that wants a gradient: .*\n  fix: x.requires_grad_"):
        model(x if model.ndtp_report.mesh.rank else x.detach())


def test_what_has_one_derivative_and_ranks_that_ask_for_others_are_named(ranks):
    ranks(2).run(check_named)
