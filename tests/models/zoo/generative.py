"""Models that generate, that solve equations, that act, and models whose weights are computed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.func import functional_call, grad, stack_module_state, vmap

from zoo.entry import entry, numbers

D = 32


def mlp(*sizes: int, act: Any = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@entry("variational autoencoder", numbers(1, 8, 8))
class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mu, self.log_var = mlp(64, 48, D), nn.Linear(D, 8), nn.Linear(D, 8)
        self.decoder = mlp(8, D, 48, 64)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.encoder(x.flatten(1)))
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)
        made = torch.sigmoid(self.decoder(z)).view_as(x)
        kl = -0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp())
        return {"made": made, "loss": F.binary_cross_entropy(made, torch.sigmoid(x), reduction="sum") + kl}


@entry("autoencoder with a codebook", numbers(3, 8, 8))
class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, D, 4, 2, 1), nn.ReLU(), nn.Conv2d(D, 8, 3, 1, 1))
        self.book, self.up = nn.Embedding(16, 8), nn.Linear(8, D)
        self.decoder = nn.ConvTranspose2d(D, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Any:
        z = self.encoder(x).permute(0, 2, 3, 1)
        codes = torch.cdist(z.reshape(-1, 8), self.book.weight.detach()).argmin(-1)
        q = self.book(codes).view_as(z)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        made = self.decoder(F.relu(self.up(z + (q - z).detach())).permute(0, 3, 1, 2))
        return made, loss + F.mse_loss(made, x)


@entry("flow of couplings", numbers(16))
class Couplings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(8, D, D, 16, act=nn.Tanh) for _ in range(3))
        self.register_buffer("order", torch.randperm(16, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Any:
        log_det = torch.zeros(len(x))
        for net in self.nets:
            a, b = x[:, self.order].chunk(2, 1)
            shift, scale = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x, log_det = torch.cat([a, b * scale.exp() + shift], 1), log_det + scale.sum(1)
        return x, Normal(0.0, 1.0).log_prob(x).sum(1) + log_det


class Masked(nn.Linear):
    """A Linear of others, which multiplies its weight by a mask."""

    def __init__(self, ins: int, outs: int, mask: Tensor) -> None:
        super().__init__(ins, outs)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


@entry("autoregressive flow of masked layers", numbers(8))
class MaskedFlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ins, hidden = torch.arange(8), torch.arange(D) % 7
        self.first = Masked(8, D, (hidden[:, None] >= ins[None]).float())
        self.last = Masked(D, 16, (ins.repeat(2)[:, None] > hidden[None]).float())

    def forward(self, x: Tensor) -> Any:
        mu, log_s = self.last(F.relu(self.first(x))).chunk(2, -1)
        z = (x - mu) * torch.exp(-log_s)
        return z, -(0.5 * z.square() + log_s).sum(-1).mean()


@entry(
    "diffusion with a class and a time by scale and shift",
    lambda b: (torch.randn(b, 3, 8, 8), torch.rand(b), torch.arange(b) % 5),
)
class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label, self.time = nn.Embedding(5, D), mlp(D, 4 * D, D, act=nn.SiLU)
        self.film, self.n1, self.n2 = nn.Linear(D, 2 * D), nn.GroupNorm(4, D), nn.GroupNorm(4, D, affine=False)
        self.inp, self.c1, self.c2, self.out = (
            nn.Conv2d(3, D, 3, 1, 1),
            nn.Conv2d(D, D, 3, 1, 1),
            nn.Conv2d(D, D, 3, 1, 1),
            nn.Conv2d(D, 3, 1),
        )
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        angles = t[:, None] * torch.exp(torch.arange(D // 2) * -(math.log(1e4) / (D // 2)))
        c = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.label(y))
        scale, shift = self.film(c)[:, :, None, None].chunk(2, 1)
        h = self.inp(x * (1 - t).sqrt()[:, None, None, None] + noise * t.sqrt()[:, None, None, None])
        h = h + self.c2(F.silu(self.n2(self.c1(F.silu(self.n1(h)))) * (1 + scale) + shift))
        flat = h.flatten(2).transpose(1, 2)
        h = h + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(h)
        return F.mse_loss(self.out(h), noise)


@entry(
    "generator and critic with a penalty on gradients",
    numbers(8),
)
class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(8, D, 16), mlp(16, D, 1, act=nn.Softplus)

    def forward(self, z: Tensor) -> Any:
        fake = self.generator(z)
        with torch.enable_grad():
            x = fake.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        return self.critic(fake).mean() + (slope.norm(dim=1) - 1).square().mean()


@entry("a field of radiance", lambda b: (torch.rand(b, 5, 3), torch.rand(b, 5, 3)))
class Radiance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(27, D, D), mlp(D + 27, D, D)
        self.density, self.feature, self.colour = nn.Linear(D, 1), nn.Linear(D, D), mlp(D + 27, 16, 3)

    def code(self, x: Tensor) -> Tensor:
        y = x[..., None] * 2.0 ** torch.arange(4)
        return torch.cat([x, y.sin().flatten(-2), y.cos().flatten(-2)], -1)

    def forward(self, points: Tensor, views: Tensor) -> Any:
        x = self.code(points)
        h = F.relu(self.second(torch.cat([F.relu(self.first(x)), x], -1)))
        alpha = 1 - torch.exp(-F.relu(self.density(h))[..., 0])
        seen = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        colours = torch.sigmoid(self.colour(torch.cat([self.feature(h), self.code(views)], -1)))
        return ((seen * alpha)[..., None] * colours).sum(1), alpha


@entry("waves that solve an equation by their second derivatives", numbers(2))
class Equation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, D), nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.c(torch.sin(self.b(torch.sin(3 * self.a(x)))))
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (second[:, 0] - first[:, 1]).square().mean() + u.square().mean()


@entry("an ordinary differential equation by Runge and Kutta", numbers(6))
class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = mlp(7, D, D, 6, act=nn.Tanh)

    def f(self, t: float, x: Tensor) -> Tensor:
        return self.field(torch.cat([x, torch.full_like(x[:, :1], t)], -1))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for i in range(4):
            t = i * h
            k1 = self.f(t, x)
            k2 = self.f(t + h / 2, x + h / 2 * k1)
            k3 = self.f(t + h / 2, x + h / 2 * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.f(t + h, x + h * k3))
        return x


@entry("a network that makes the weights of another", lambda b: (torch.randn(b, 6), torch.randn(4)))
class Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.main = mlp(4, D, 6 * 8 + 8 + 8 * 2 + 2), mlp(6, 8, 2)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        flat, made, at = self.maker(code), {}, 0
        for name, p in self.main.named_parameters():
            made[name] = flat[at : at + p.numel()].view(p.shape) + 0.0
            at += p.numel()
        return functional_call(self.main, made, (x,))


@entry("an ensemble by torch.func", numbers(6))
class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nets = [mlp(6, D, 3) for _ in range(3)]
        stacked, _ = stack_module_state(nets)
        self.stacked = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in stacked.items()})
        self.bare, self.head = [mlp(6, D, 3)], nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = {k.replace("_", ".", 1): v for k, v in self.stacked.items()}
        outs = vmap(lambda p: functional_call(self.bare[0], p, (x,)))(given)
        return self.head(outs.mean(0))


@entry("a learner that learns in its forward", lambda b: (torch.randn(b, 4), torch.randn(b, 2)))
class Learner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, D, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = lambda p: F.mse_loss(functional_call(self.net, p, (x[::2],)), y[::2])  # noqa: E731
        steps = grad(loss)(weights)
        quick = {name: p - 0.1 * steps[name] for name, p in weights.items()}
        return F.mse_loss(functional_call(self.net, quick, (x[1::2],)), y[1::2])


class Spline(nn.Module):
    """A layer of a Kolmogorov-Arnold network."""

    def __init__(self, ins: int, outs: int, grid: int = 5, order: int = 3) -> None:
        super().__init__()
        self.base, self.order = nn.Parameter(torch.randn(outs, ins) * 0.1), order
        self.spline = nn.Parameter(torch.randn(outs, ins, grid + order) * 0.1)
        self.register_buffer(
            "grid", (torch.arange(-order, grid + order + 1) * (2 / grid) - 1).expand(ins, -1).contiguous()
        )

    def forward(self, x: Tensor) -> Tensor:
        g, y = self.grid, x.unsqueeze(-1)
        b = ((y >= g[:, :-1]) & (y < g[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            b = (y - g[:, : -(k + 1)]) / (g[:, k:-1] - g[:, : -(k + 1)]) * b[:, :, :-1] + (g[:, k + 1 :] - y) / (
                g[:, k + 1 :] - g[:, 1:-k]
            ) * b[:, :, 1:]
        return F.linear(F.silu(x), self.base) + F.linear(b.view(len(x), -1), self.spline.view(len(self.spline), -1))


@entry("Kolmogorov-Arnold network", numbers(8))
class Splines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Spline(8, 16), Spline(16, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(torch.tanh(x)))


class Uncertain(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.mu, self.rho = nn.Parameter(torch.randn(outs, ins) * 0.2), nn.Parameter(torch.full((outs, ins), -3.0))
        self.bias = nn.Parameter(torch.zeros(outs))

    def forward(self, x: Tensor) -> Tensor:
        sigma = F.softplus(self.rho)
        self.kl = (0.5 * (sigma.square() + self.mu.square()) - torch.log(sigma)).sum()
        return F.linear(x, self.mu + sigma * torch.randn_like(sigma), self.bias)


@entry("weights with a mean and a deviation", numbers(8))
class Bayesian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Uncertain(8, D), Uncertain(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.head(F.relu(self.b(F.relu(self.a(x)))))
        return y, 1e-3 * (self.a.kl + self.b.kl)


@entry("actor and critic with an entropy", lambda b: (torch.randn(b, 12), torch.arange(b) % 4, torch.randn(b)))
class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = mlp(12, 64, 64, act=nn.Tanh), nn.Linear(64, 4), nn.Linear(64, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, 2**0.5)

    def forward(self, state: Tensor, action: Tensor, reward: Tensor) -> Any:
        h = torch.tanh(self.body(state))
        policy, value = Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)
        gain = (reward - value.detach()) * policy.log_prob(action)
        return {
            "loss": F.smooth_l1_loss(value, reward) - gain.mean() - 0.01 * policy.entropy().mean(),
            "probs": policy.probs,
        }


@entry("policy with a squashed normal, and twin values", numbers(10))
class SoftActor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.q1, self.q2 = mlp(10, D, 6), mlp(13, D, 1), mlp(13, D, 1)

    def forward(self, state: Tensor) -> Any:
        mu, log_std = self.policy(state).chunk(2, -1)
        policy = Normal(mu, log_std.clamp(-5, 2).exp())
        raw = mu + policy.stddev * torch.randn_like(mu)
        action = torch.tanh(raw)
        log_p = (policy.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).sum(-1, keepdim=True)
        both = torch.cat([state, action], -1)
        return (0.2 * log_p - torch.min(self.q1(both), self.q2(both))).mean(), action


@entry("duelling values of images, with noise in its layers", numbers(2, 12, 12))
class Duelling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(2, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten())
        self.value, self.advantage = mlp(144, D, 1), mlp(144, D, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.convs(x / 2.0)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


class Undone(torch.autograd.Function):
    """Couplings whose inputs are computed from their outputs in backward, so that none are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Any) -> Tensor:
        ctx.blocks = blocks
        for f, g in blocks:
            a, b = x.chunk(2, -1)
            a = a + f(b)
            x = torch.cat([a, b + g(a)], -1)
        ctx.y = x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y = ctx.y
        for f, g in reversed(ctx.blocks):
            (a, b), (da, db) = y.chunk(2, -1), grad.chunk(2, -1)
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                ga = g(a)
                torch.autograd.backward(ga, db)
            b, da = b - ga.detach(), da + a.grad
            with torch.enable_grad():
                b = b.detach().requires_grad_()
                fb = f(b)
                torch.autograd.backward(fb, da)
            y, grad = torch.cat([a.detach() - fb.detach(), b.detach()], -1), torch.cat([da, db + b.grad], -1)
        return grad, None


@entry("blocks that are undone in backward", numbers(16))
class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(16, 2 * D), nn.Linear(2 * D, 4)
        self.blocks = nn.ModuleList(nn.ModuleList(mlp(D, 48, D, act=nn.GELU) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Undone.apply(self.inp(x), self.blocks))
