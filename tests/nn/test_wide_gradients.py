"""Gradients of 16-bit parameters that add up in fp32: near fp64 after many micro-batches; what else writes to them."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import CommMeter, Grid

COUNT = 96  # micro-batches


class Net(nn.Module):
    """Layers that are split, a norm and a scale that every rank has whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return (self.down(torch.tanh(self.up(self.norm(x)))) * self.scale[:1]).float().square().sum()


def batch(i, dtype):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(dtype) + 1


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def trained(model, mesh, held, dtype=torch.bfloat16):
    mine = mesh.grid.coordinate(mesh.rank).get("dp", 0) if mesh else 0
    ranks = mesh.grid["dp"] if mesh and "dp" in mesh.grid else 1
    for i in range(COUNT):
        x = batch(i, dtype).chunk(ranks)[mine]
        if held and i < COUNT - 1:
            with mesh.accumulate():
                model(x).backward()
        else:
            model(x).backward()
    return [whole(p.grad).double() for p in model.parameters()]


def off(found, expected):
    return [((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in zip(found, expected, strict=True)]


def check(sizes, held):
    torch.manual_seed(0)
    dense = Net().bfloat16()
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in dense.parameters()]
    for i in range(COUNT):  # each backward in bf16, as it is computed; sums in fp64
        dense.zero_grad()
        dense(batch(i, torch.bfloat16)).backward()
        for total, p in zip(exact, dense.parameters(), strict=True):
            total += p.grad.double()
    dense.zero_grad()
    errors, moved = [], []
    for is_wide in (False, True):
        mesh = mesh_of(Grid(sizes))
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, example=batch(0, torch.bfloat16))
        if is_wide:
            ndtp.nn.accumulate_in_fp32(model.parameters())
        with CommMeter() as meter:
            errors.append(max(off(trained(model, mesh, held), exact)))
        moved.append(meter.volume)
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert errors[1] < 0.004 + 0.4 * errors[0], errors  # one rounding of bf16 is 0.004 at most
    assert errors[1] < 0.01 < errors[0], errors
    assert moved[0] == moved[1]


@pytest.mark.parametrize(("sizes", "held"), [({"x": 2}, False), ({"dp": 2}, False), ({"dp": 2}, True)], ids=str)
def test_many_micro_batches(ranks, sizes, held):
    ranks(2).run(check, sizes, held)


def test_what_else_writes_begins_a_new_sum():
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8).bfloat16(), batch(0, torch.bfloat16)
    ndtp.nn.accumulate_in_fp32(layer.parameters())
    ndtp.nn.accumulate_in_fp32(layer.parameters())  # once is enough

    def once():
        layer(x).float().square().sum().backward()
        return layer.weight.grad.clone()

    first = once()
    asked = torch.autograd.grad(layer(x).float().square().sum(), layer.weight)[0]
    torch.testing.assert_close(asked, first)  # and leaves `.grad` as it was
    torch.testing.assert_close(layer.weight.grad, first)
    layer.weight.grad.mul_(0.5)
    torch.testing.assert_close(once(), first * 1.5)
    layer.zero_grad(set_to_none=False)
    torch.testing.assert_close(once(), first)
    layer.zero_grad()
    torch.testing.assert_close(once(), first)
    layer.weight.grad = torch.zeros_like(first)
    torch.testing.assert_close(once(), first)
    wide = nn.Linear(4, 4)
    ndtp.nn.accumulate_in_fp32(wide.parameters())
    assert wide.weight._backward_hooks is None
