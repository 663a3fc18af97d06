"""A mixture of experts in fp64 by plain loops over tokens and experts, and the same on a grid, compared."""

from __future__ import annotations

import math

import torch
from products import mesh_of
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

import ndtp
from ndtp.nn.random import draw_seed, key_of, uniform

HIDDEN, INNER, EXPERTS, TOKENS = 8, 8, 8, 16
GATE = {"silu": F.silu, "relu": F.relu}


def drawn(tokens, columns, what):
    """The draw of a router's step, over all tokens."""
    return uniform(
        (tokens, columns),
        [slice(0, tokens), slice(0, columns)],
        key_of(draw_seed(), f"moe.router.{what}"),
        torch.get_default_device().type,
    )


class Choice:
    """What a router decides, token by token: (expert, weight) pairs, and the losses of the batch."""

    def __init__(
        self, name, x, weights, top_k, capacity=None, groups=1, balance=0.0, z_loss=0.0, normalize=True,
        expert_groups=1, top_groups=1,
    ):  # fmt: skip
        self.expert_groups, self.top_groups = expert_groups, top_groups
        self.tokens, self.experts, self.top_k = len(x), len(weights["weight"]), top_k
        self.logits = x @ weights["weight"].T
        self.weights, self.x, self.groups, self.balance = weights, x, groups, balance
        self.loss = z_loss * (self.logits.exp().sum(-1).log() ** 2).mean() if z_loss else torch.zeros(())
        self.normalize = normalize
        self.pairs = getattr(self, name)()
        if capacity is not None:
            self.drop(capacity)

    def best(self, row, k=None):
        values = row.tolist()
        return sorted(range(len(values)), key=lambda i: -values[i])[: k or self.top_k]

    def softmax(self):
        return torch.stack([row.exp() / row.exp().sum() for row in self.logits])

    def mixtral(self):
        scores = self.softmax()
        chosen = [self.best(row) for row in scores]
        if self.balance:
            f = torch.zeros(self.experts, dtype=torch.float64)
            for expert in range(self.experts):
                f[expert] = sum(expert in of for of in chosen) / self.tokens
            self.loss = self.loss + self.balance * self.experts * (f * scores.mean(0)).sum()
        total = [sum(row[i] for i in of) if self.normalize else 1.0 for row, of in zip(scores, chosen, strict=True)]
        return [[(i, row[i] / norm) for i in of] for row, of, norm in zip(scores, chosen, total, strict=True)]

    switch = qwen = mixtral

    def gshard(self):
        balance, self.balance = self.balance, 0.0
        pairs, scores, size = self.mixtral(), self.softmax(), self.tokens // self.groups
        random = drawn(self.tokens, 1, "second")
        for g in range(self.groups):
            part = range(g * size, (g + 1) * size)
            c = [sum(pairs[t][0][0] == e for t in part) for e in range(self.experts)]
            m = scores[part.start : part.stop].mean(0)
            loss = sum(c[e] / size * m[e] for e in range(self.experts)) / self.experts
            self.loss = self.loss + balance * loss / self.groups
        return [[of[0], of[1] if 2 * of[1][1] > random[t, 0] else None] for t, of in enumerate(pairs)]

    def noisy(self):
        noise = drawn(self.tokens, 2 * self.experts, "noise")
        radius, angle = noise.chunk(2, -1)
        normal = (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)
        spread = F.softplus(self.x @ self.weights["noise"].T)
        h = self.logits + normal * spread
        pairs, importance, load = [], torch.zeros(self.experts, dtype=torch.float64), []
        for row in h:
            of = self.best(row)
            weights = torch.stack([row[i] for i in of]).softmax(0)
            pairs.append(list(zip(of, weights, strict=True)))
            importance = importance.index_add(0, torch.tensor(of), weights)
            order = self.best(row, self.experts)
            load.append(row[[[j for j in order if j != i][self.top_k - 1] for i in range(self.experts)]])
        load = (0.5 * (1 + torch.erf((self.logits - torch.stack(load)) / spread / 2**0.5))).sum(0)
        for x in (importance, load):
            self.loss = self.loss + self.balance * ((x - x.mean()) ** 2).mean() / x.mean() ** 2
        return pairs

    def deepseek(self):
        scores, bias = 1 / (1 + (-self.logits).exp()), self.weights["bias_of_choice"]
        chosen = [self.best(self.within_groups(row + bias)) for row in scores]
        f = torch.tensor([sum(i in of for of in chosen) / self.tokens for i in range(self.experts)]).double()
        p = torch.stack([row / row.sum() for row in scores]).mean(0)
        self.loss = self.loss + self.balance * self.experts * (f * p).sum()
        return [
            [(i, row[i] / (1e-20 + sum(row[j] for j in of))) for i in of]
            for row, of in zip(scores, chosen, strict=True)
        ]

    def within_groups(self, row):
        """All but the groups of experts whose two best add up to most are out of the question."""
        size = self.experts // self.expert_groups
        groups = [row[g * size : (g + 1) * size] for g in range(self.expert_groups)]
        sums = torch.stack([sum(sorted(of.tolist())[-2:]) * torch.ones(()) for of in groups])
        allowed = self.best(sums, self.top_groups)
        return torch.cat([of if g in allowed else of - torch.inf for g, of in enumerate(groups)])

    def drop(self, factor):
        size = self.tokens // self.groups
        room = max(1, math.ceil(size * factor / self.experts))
        for g in range(self.groups):
            taken = [0] * self.experts
            for choice in range(self.top_k):
                for t in range(g * size, (g + 1) * size):
                    pair = self.pairs[t][choice]
                    if pair is not None:
                        taken[pair[0]] += 1
                        if taken[pair[0]] > room:
                            self.pairs[t][choice] = None


def dense(x, pairs, up, down, activation):
    """A loop over experts, each with the tokens that chose it."""
    y = torch.zeros_like(x)
    for e in range(len(up)):
        mine = [(t, pair[1]) for t, of in enumerate(pairs) for pair in of if pair is not None and pair[0] == e]
        if mine:
            tokens = torch.tensor([t for t, _ in mine])
            rows, act = x[tokens], GATE[activation]
            h = act(rows @ up[e, 0].T) * (rows @ up[e, 1].T) if up.dim() == 4 else act(rows @ up[e].T)
            y = y.index_add(0, tokens, torch.stack([weight for _, weight in mine])[:, None] * (h @ down[e].T))
    return y


def assert_close(actual, expected, where):
    """The largest difference, which is one of rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{where}\n{text}")
    return (actual - expected).abs().max().item() if actual.numel() else 0.0


def whole(x):
    """Gathered one dim of the mesh at a time: torch warns of more at once."""
    if hasattr(x, "full_tensor"):
        for dim in reversed(range(x.device_mesh.ndim)):
            x = x.redistribute(placements=[Replicate() if i == dim else p for i, p in enumerate(x.placements)])
        x = x.to_local()
    return x.detach().clone()


def check(
    grid, router="mixtral", options=None, tokens=TOKENS, scheme="3d", gated=True, skew=0.0, mesh_of=mesh_of, **arguments
):
    """Output, losses, every gradient and every byte of a layer on a grid, against the loops; what was found."""
    mesh, options = mesh_of(grid), options or {}
    where = f"{grid}, {scheme}, {router} {options}, {arguments}"
    moe = ndtp.nn.MoE(
        HIDDEN, INNER, EXPERTS, router=router, gated=gated, activation="silu" if gated else "relu", mesh=mesh,
        scheme=scheme, options=options, dtype=torch.float64, seed=1, **arguments,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator) + skew
    upstream = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator)
    if router == "deepseek":
        moe.router.bias_of_choice.copy_(torch.randn(EXPERTS, generator=generator))
    parameters = {
        name: whole(p).requires_grad_(name != "router.bias_of_choice") for name, p in moe.state_dict().items()
    }
    x_dense = x.clone().requires_grad_()
    weights = {name.removeprefix("router."): p for name, p in parameters.items() if name.startswith("router.")}
    known = {"top_k", "capacity", "groups", "balance", "z_loss", "normalize", "expert_groups", "top_groups"}
    settings = {**getattr(type(moe.router), "defaults", {}), **options}
    settings = {key: value for key, value in settings.items() if key in known} | {"top_k": moe.top_k}
    torch.manual_seed(3)
    choice = Choice(router, x_dense, weights, **settings)
    up = next(p for name, p in parameters.items() if "up_proj" in name)
    expected = dense(x_dense, choice.pairs, up, parameters["experts.down_proj"], moe.experts.activation)
    if moe.shared is not None:
        shared = moe.shared.to_dense()(x_dense)
        expected = expected + shared * (x_dense @ parameters["shared_gate.weight"].T).sigmoid()
    ((expected * upstream).sum() + choice.loss).backward()

    shard = moe.in_layout.shard(x, mesh.rank).clone().requires_grad_()
    torch.manual_seed(3)
    with ndtp.CommMeter() as meter:
        y = moe(shard)
        loss = (y * moe.out_layout.shard(upstream, mesh.rank)).sum() + moe.aux_loss
        loss.backward()
    errors = {
        "y": assert_close(y.detach(), moe.out_layout.shard(expected.detach(), mesh.rank), f"{where}: y"),
        "loss": assert_close(moe.aux_loss.detach().double(), choice.loss.detach().double(), f"{where}: loss"),
        "dx": assert_close(shard.grad, moe.in_layout.shard(x_dense.grad, mesh.rank), f"{where}: dx"),
    }
    for name, parameter in moe.named_parameters():
        if name.startswith("shared."):  # an MLP, which has tests of its own
            continue
        grad = parameters[name].grad
        assert parameter.grad is not None, f"{where}: {name} has no gradient"
        grad = torch.zeros_like(parameters[name]) if grad is None else grad
        errors[f"d{name}"] = assert_close(whole(parameter.grad), grad, f"{where}: d{name}")
    counts = moe.counts()
    predicted = moe.volume(tokens, routing=counts)
    assert meter.volume == predicted, f"{where}: {meter.volume} is not {predicted}"
    least, most = (moe.volume(tokens, routing=bound).total for bound in ("least", "most"))
    assert least <= predicted.total <= most, f"{where}: {predicted.total} is not from {least} to {most}"
    assert not mesh.collectives.in_flight, "handles left over"
    return {
        "loads": counts.sum(0).tolist(),
        "errors": errors,
        "metered": meter.volume.total,
        "predicted": predicted.total,
    }


def check_all(cases):
    return [check(grid, **arguments) for grid, arguments in cases]


def fused(state):
    """A dense state dict as transformers has it."""
    key = "experts.gate_up_proj"
    return {**state, key: state[key].flatten(1, 2)}


def separate(state, names):
    """A dense state dict with three weights of these names for each expert."""
    found = dict(state)
    up, down = (found.pop(f"experts.{name}") for name in ("gate_up_proj", "down_proj"))
    for i, each in enumerate(zip(*up.unbind(1), down, strict=True)):
        found |= {f"experts.{i}.{name}.weight": one for name, one in zip(names, each, strict=True)}
    return found
