"""Torch's optimizers, clipping and scaling on a mix of split and plain parameters, in their foreach and fused forms."""

import copy

import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid

OPTIMIZERS = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "rows": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 4)).double()


def trained(model, make):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(3):
        scaler.scale(model(x).square().mean()).backward()
        with ndtp.nn.as_dense():
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [*whole, norm.full_tensor() if hasattr(norm, "full_tensor") else norm]


def check_pairs():
    for sizes, scheme, names in (({"x": 2}, "1d", ("foreach", "rows")), ({"z": 2}, "3d", ("fused", "rows"))):
        for name in names:
            make = OPTIMIZERS[name]
            model = ndtp.parallelize(made(), mesh_of(Grid(sizes)), scheme=scheme)
            assert all(hasattr(p, "full_tensor") for p in model.parameters())  # what is no pair, too
            for mine, theirs in zip(trained(model, make), trained(made(), make), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=f"{name}, {sizes}")


def test_a_model_of_pairs(ranks):
    ranks(2).run(check_pairs)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 6), nn.Parameter(torch.ones((), dtype=torch.float64))
        self.double()

    def forward(self, x):
        return self.scale * self.layer(x)


def halved(model):
    model(torch.arange(16.0, dtype=torch.float64).view(2, 8)).square().mean().backward()
    with ndtp.nn.as_dense():
        for p in model.parameters():
            mask = p.grad.abs() > torch.zeros(()).lerp_(p.grad.abs().max().float(), 0.5)
            p.grad[mask] = p.grad[mask] / 2
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def check_masks():
    torch.manual_seed(0)
    dense = Scaled()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d")
    torch.testing.assert_close(halved(model), halved(dense))


def test_masks_also_of_a_number(ranks):
    ranks(2).run(check_masks)
