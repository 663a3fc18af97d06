"""Scripts of TorchScript and transforms of `torch.func` in a forward and behind it: they ask no tensor how it lies."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.func import grad, jacrev, vjp, vmap

import ndtp
from ndtp import Grid


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) * x


SCALED = torch.jit.script(Scaled())

OF_ROWS = {  # rows to rows of as many numbers; the second one is of the code's model
    "a script": lambda x, _: scripted(x),
    "a module of a script": lambda x, _: SCALED(x),
    "vmap of softmax": lambda x, _: vmap(lambda r: r.softmax(0))(x),
    "vmap of norms": lambda x, _: vmap(lambda r: r / r.norm())(x),
    "vmap along columns": lambda x, _: vmap(lambda c: c - c.max(), in_dims=1, out_dims=1)(x),
    "vmap with a parameter": lambda x, m: vmap(lambda r: r * m.scale)(x),
    "vmap with what it does not map": lambda x, _: vmap(lambda r: r @ x.t() @ x)(x.detach()),
    "vmap of vmap": lambda x, _: vmap(vmap(lambda e: e.sin() * e))(x),
    "grad": lambda x, _: grad(lambda t: (t.sin() * t).sum())(x),
    "vmap of grad": lambda x, _: vmap(grad(lambda r: (r.softmax(0) * r).sum()))(x),
    "vjp": lambda x, _: vjp(torch.sin, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda x, _: x + jacrev(lambda t: t.sin().sum(0))(x).sum((0, 1)),
}


class Net(nn.Module):
    def __init__(self, of_rows):
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(16, 12), nn.Linear(12, 16), nn.Parameter(torch.randn(12))
        self.of_rows = of_rows

    def forward(self, x):
        return self.b(OF_ROWS[self.of_rows](self.a(x), self))


def check(sizes, scheme):
    mesh, x = mesh_of(Grid(**sizes)), torch.randn(8, 16, dtype=torch.float64)
    for name in OF_ROWS:
        torch.manual_seed(0)
        dense = Net(name).double()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme, example=x)
        for m in (model, dense):
            m.made = m(x)
            m.loss = m.made.square().mean() + vmap(lambda r: r.logsumexp(0))(m.made).mean()
            m.loss.backward()
        same = torch.testing.assert_close
        same(model.made.gathered() if hasattr(model.made, "gathered") else model.made, dense.made, msg=name)
        same(model.loss, dense.loss, msg=name)
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                same(p.grad.full_tensor(), q.grad, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(float(vmap(torch.dot)(model.a.weight, model.a.weight).sum()), float(
                dense.a.weight.square().sum()
            ))  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "scheme"), [({"x": 2}, "1d"), ({"x": 2, "y": 2}, "2d"), ({"z": 2, "y": 2}, "3d")], ids=str
)
def test_equal_dense(ranks, sizes, scheme):
    ranks(torch.Size(sizes.values()).numel()).run(check, sizes, scheme)
