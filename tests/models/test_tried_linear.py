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
    scale = 1.0  # until somebody changes it

    def forward(self, x):
        return super().forward(x) * self.scale


class Private(nn.Linear):
    _gain = 1.0

    def forward(self, x):
        return super().forward(x) * self._gain


class ByWidth(nn.Linear):
    def forward(self, x):
        return super().forward(x * (5 / self.in_features))


class ByMark(nn.Linear):
    def forward(self, x):
        return super().forward(x) * getattr(self.weight, "gain", 1.0)


class Detached(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class WithoutGradient(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Clamped(nn.Linear):
    def forward(self, x):
        return F.linear(x.clamp(-1e6, 1e6), self.weight, self.bias)


class ByRows(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.numel() < 1000 else x


class Keeping(nn.Linear):
    def forward(self, x):
        self.last = x
        return super().forward(x)


class WithoutBias(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.bias = None
        return y


SEEN = []


class Telling(nn.Linear):
    def forward(self, x):
        SEEN.append(x)
        return super().forward(x)


class CastingBack(nn.Linear):
    """Under autocast it gives another dtype than an `nn.Linear`."""

    def forward(self, x):
        return super().forward(x).to(x.dtype)


class More(nn.Linear):
    def forward(self, x, factor=None):
        return super().forward(x) if factor is None else super().forward(x * factor)


class Doubled(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y + y


class OfItsOwn(nn.Linear):
    def forward(self, x):
        return linear(x, self.weight, self.bias)


def linear(x, weight, bias):
    return F.linear(x, weight, bias).tanh()


def closing_over(linear):
    class OfAFactory(nn.Linear):
        def forward(self, x):
            return linear(x, self.weight, self.bias)

    return OfAFactory


class Mixed(nn.Linear):
    """Under autocast it gives another dtype for inputs of 16 bits."""

    def forward(self, x):
        if x.dtype == self.weight.dtype:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).to(self.weight.dtype)


class Cast:
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class OfAMixin(Cast, nn.Linear):
    pass


class WithoutSizes(nn.Linear):
    def __init__(self, *sizes):
        nn.Module.__init__(self)
        self.weight, self.bias = nn.Parameter(torch.ones(sizes[::-1])), nn.Parameter(torch.ones(sizes[1]))


class Masked(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Computed(nn.Linear):
    weight = property(lambda self: self._parameters["weight"] * 2)


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class OverScaled(Scaled):
    def forward(self, x):
        return super().forward(x)


class WithAWayOfItsOwn(nn.Linear):
    def matmul(self, x):
        return (x @ self.weight.T).tanh()

    def forward(self, x):
        return self.matmul(x) + self.bias


OTHERS = [
    WithAWayOfItsOwn, Scaled, Private, ByWidth, ByMark, Detached, WithoutGradient, Clamped, ByRows, Keeping,
    WithoutBias, Telling, More, Doubled, OfItsOwn, Masked, Called, OverScaled, WithoutSizes, closing_over(F.linear),
]  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Casting, CastingBack, ByHand])
def test_what_computes_the_same_is_one(kind, bias):
    assert is_linear(kind(16, 100, bias), casts=True)


def test_a_subclass_without_code_is_one():
    assert is_linear(Begun(16, 8))


@pytest.mark.parametrize("kind", OTHERS)
def test_what_computes_or_does_something_else_is_none(kind):
    layer = kind(16, 8)
    assert not is_linear(layer, casts=True) and layer.bias is not None and not SEEN


def test_a_weight_that_is_computed_is_no_parameter():
    layer = nn.Linear(4, 4)
    layer.__class__ = Computed
    assert not is_linear(layer, casts=True)


def test_one_that_casts_is_told_apart():
    assert not is_linear(ByHand(4, 4)), "with a bias it gives another dtype under autocast"
    assert not is_linear(Casting(4, 4)) and is_linear(ByHand(4, 4, False)) and is_linear(Begun(4, 4))


def test_a_trial_computes_with_numbers_also_where_nothing_has_any():
    class Fresh(Casting):
        pass

    class FreshDouble(Doubled):
        pass

    with FakeTensorMode(), torch.device("meta"), torch.no_grad():
        assert is_linear(Fresh(4, 4), casts=True) and not is_linear(FreshDouble(4, 4), casts=True)


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


def check_autocast(kind, sizes):
    """A layer that gives another dtype there runs its own code."""
    ids = torch.arange(24).view(4, 6)
    torch.manual_seed(0)
    dense = Model(kind, torch.float32)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(sizes)), example=ids)
    assert str(model.ndtp_report).startswith("replaced 3 of 3 Linears")
    seen = []
    for each in (dense, model):
        each.up.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen.append(each(ids))
        seen[-1].backward()
    (one, expected, other, found), rounding = seen, {"rtol": 2e-2, "atol": 2e-3}
    assert one == other, seen
    torch.testing.assert_close(found.detach(), expected.detach(), **rounding)
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        torch.testing.assert_close(grad, theirs.grad, **rounding)


@pytest.mark.parametrize("kind", [Casting, CastingBack, ByHand])
def test_under_autocast(ranks, kind):
    ranks(2).run(check_autocast, kind, {"x": 2})


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
        torch.testing.assert_close(grad, theirs.grad, msg=lambda said, name=name: f"{name}: {said}", **rounding)


def check_other_dtypes():
    """A copy, too, runs the code of the class for them."""
    torch.manual_seed(0)
    x, dense = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), OfAMixin(8, 16), Mixed(16, 8))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), example=x)
    assert str(model.ndtp_report).startswith("replaced 3 of 3 Linears")
    for each in (model, copy.deepcopy(model)):
        for autocast in (False, True):
            for dtype in (torch.float64, torch.bfloat16):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    y, expected = each[1](x.to(dtype)), dense[1](x.to(dtype))
                    z, wanted = each[2](expected.to(dtype)), dense[2](expected.to(dtype))
                for found, one in ((y, expected), (z, wanted)):
                    found = found.gathered() if hasattr(found, "gathered") else found
                    assert found.dtype == one.dtype, (autocast, dtype)
                    torch.testing.assert_close(found, one, rtol=2e-2, atol=2e-2)


def test_other_dtypes(ranks):
    ranks(2).run(check_other_dtypes)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Casting, torch.float32), (Casting, torch.bfloat16), (ByHand, torch.float32)]
)
def test_it_is_split_as_one(ranks, kind, dtype):
    ranks(3).run(check, kind, dtype, {"x": 3})
