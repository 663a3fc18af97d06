"""Subclasses of nn.Linear with code of their own: those that compute what it does are split as it is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ndtp
from ndtp import Grid
from ndtp.models.roles import is_linear


class Begun(nn.Linear):
    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.1)
        nn.init.zeros_(self.bias)


class Casting(nn.Linear):
    """As of models that keep fp32 weights and compute in 16 bits."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class ByHand(nn.Linear):
    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Scaled(nn.Linear):
    scale = 2.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Detached(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class Clamped(nn.Linear):
    def forward(self, x):
        return F.linear(x.clamp(-100, 100), self.weight, self.bias)


class Dropping(nn.Linear):
    def forward(self, x):
        return F.linear(F.dropout(x, 0.5, self.training), self.weight, self.bias)


class Keeping(nn.Linear):
    def forward(self, x):
        self.last = x
        return super().forward(x)


class Counting(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape)
        return super().forward(x)


class Wider(nn.Linear):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class Masked(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Casting, ByHand])
def test_what_computes_the_same_is_one(kind, bias):
    assert is_linear(kind(16, 100, bias))


def test_a_subclass_without_code_is_one():
    assert is_linear(Begun(16, 8))


@pytest.mark.parametrize("kind", [Scaled, Detached, Clamped, Dropping, Keeping, Counting, Wider, Masked])
def test_what_computes_or_does_something_else_is_none(kind):
    layer = kind(16, 8)
    assert not is_linear(layer) and not getattr(layer, "seen", None) and not hasattr(layer, "last")


def test_a_trial_computes_with_numbers_also_where_nothing_has_any():
    with FakeTensorMode(), torch.device("meta"), torch.no_grad():

        class OfItsOwn(Casting):
            pass

        assert is_linear(OfItsOwn(4, 4)) and not is_linear(Scaled(5, 4))


class Model(nn.Module):
    def __init__(self, kind, dtype):
        super().__init__()
        self.dtype = dtype
        self.table, self.up, self.down, self.head = (
            nn.Embedding(24, 32), kind(32, 48), kind(48, 32), kind(32, 24, False)
        )  # fmt: skip

    def forward(self, ids):
        x = self.table(ids).to(self.dtype)
        x = x + self.down(F.relu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def check(kind, dtype, sizes):
    ids = torch.arange(24).view(4, 6)
    torch.manual_seed(0)
    dense = Model(kind, dtype)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(sizes)), example=ids)
    report = str(model.ndtp_report)
    assert report.startswith("replaced 3 of 3 Linears"), report
    expected, found = dense(ids), model(ids)
    expected.backward(), found.backward()
    rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(found.detach(), expected.detach(), **rounding)
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        torch.testing.assert_close(grad, theirs.grad, msg=name, **rounding)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Casting, torch.float32), (Casting, torch.bfloat16), (ByHand, torch.float32)]
)
def test_it_is_split_as_one(ranks, kind, dtype):
    ranks(3).run(check, kind, dtype, {"x": 3})
