"""Numbers that code puts everywhere, -inf for example, do not reach gradients from rows that are padding."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid

NONE = -torch.inf


class Attention(nn.Module):
    """Three heads of odd lengths, which ranks share."""

    def __init__(self, masked):
        super().__init__()
        self.masked, self.table, self.qk, self.v = masked, nn.Embedding(30, 21), nn.Linear(21, 42), nn.Linear(21, 21)

    def forward(self, ids):
        x = self.table(ids)
        q, k = self.qk(x).unflatten(-1, (2, 3, 7)).permute(2, 0, 3, 1, 4)
        keep = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        v = self.v(x).unflatten(-1, (3, 7)).transpose(1, 2)
        return (self.masked(q @ k.mT, keep) @ v).transpose(1, 2).flatten(2) + x


MASKED = {
    "where": lambda s, keep: torch.where(keep, s, torch.tensor(NONE)).softmax(-1),
    "of the scores": lambda s, keep: s.masked_fill(torch.ones_like(s).tril() == 0, NONE).softmax(-1),
    "in place": lambda s, keep: (s + 0).masked_fill_(s < s.mean(-1, True), NONE).softmax(-1),
    "a mask": lambda s, keep: (s + torch.full_like(s, NONE).triu(1)).softmax(-1),
    "logsumexp": lambda s, keep: (y := torch.where(keep, s, NONE)).sub(y.logsumexp(-1, True)).exp(),
}


class Rows(nn.Module):
    """Code between layers, and a parameter whose gradient sums over rows."""

    def __init__(self, made, used):
        super().__init__()
        self.made, self.used, self.net = made, used, nn.Linear(6, 17)
        self.w, self.scale, self.norm = nn.Parameter(torch.eye(17)), nn.Parameter(torch.ones(17)), nn.LayerNorm(17)

    def forward(self, x):
        return self.used(self, self.made(self.net(x)))


MADE = {
    "softmax": lambda h: torch.where(torch.arange(17) != 2, h, NONE).softmax(-1),
    "nan": lambda h: torch.where(torch.ones(len(h), 17, dtype=torch.bool), h, torch.nan),
    "masked": lambda h: h.masked_fill(torch.zeros_like(h).add(1) == 0, torch.inf),
    "logit": lambda h: h.sigmoid().logit(),
    "a leaf": lambda h: h * torch.full_like(h, 0.5, requires_grad=True),
}
USED = {
    "product": lambda model, h: h @ model.w,
    "scale": lambda model, h: h * model.scale,
    "norm": lambda model, h: model.norm(h),
    "gram": lambda model, h: torch.einsum("bi,ij,cj->bc", h, model.w, h),
}


def compare(dense, mesh, x, what):
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, example=x)
    for each in (dense, model):
        each(x).sin().sum().backward()
    for (name, theirs), mine in zip(dense.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            assert theirs.grad.isfinite().all()
            mine = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            torch.testing.assert_close(mine, theirs.grad, msg=lambda text, at=name: f"{what}, {at}: {text}")


def check_padding(sizes):
    mesh = mesh_of(Grid(**sizes))
    torch.manual_seed(0)
    for what, masked in MASKED.items():
        compare(Attention(masked).double(), mesh, torch.randint(30, (5, 7)), what)
    for made, code in MADE.items():
        for used, parameter in USED.items():
            compare(Rows(code, parameter).double(), mesh, torch.randn(5, 6).double(), f"{made}, {used}")


@pytest.mark.parametrize("sizes", [{"x": 2}, {"z": 2}], ids=str)
def test_padding_reaches_no_gradient(ranks, sizes):
    ranks(2).run(check_padding, sizes)
