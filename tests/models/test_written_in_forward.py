"""Models whose forward changes their own parameters before it uses them: temperatures, masked weights."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import ndtp
from ndtp import Grid
from ndtp.models.kept_parameters import parameters_kept


def replaced(p, change):
    p.data = change(p.data)


def in_place(p, change):
    p.data.copy_(change(p.data))


def without_grad(p, change):
    with torch.no_grad():
        p.copy_(change(p))


class Masked(nn.Linear):
    """A Linear that writes zeros into its weight, as autoregressive models have it."""

    write = staticmethod(replaced)

    def forward(self, x):
        self.write(self.weight, torch.tril)
        return super().forward(x)


class Model(nn.Module):
    """Products, and parameters that every rank has whole: a temperature, the weights of a norm and of an activation."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.first, self.masked, self.last = nn.Linear(8, 12), Masked(12, 12), nn.Linear(12, 8)
        self.norm, self.act = nn.LayerNorm(12), nn.PReLU()
        self.temperature, self.gain = nn.Parameter(torch.tensor(9.0)), nn.Parameter(torch.full((8,), 9.0))
        self.masked.write = write

    def forward(self, x):
        for p in (self.temperature, self.gain, self.norm.weight, self.act.weight, self.last.bias):
            self.write(p, lambda x: (x * 3 + 1).clamp(max=5.0))
        y = self.last(self.act(self.norm(self.masked(self.first(x)))))
        self.write(self.temperature, lambda x: x / 2)
        return y * self.gain / self.temperature


def plain(x):
    x = x.gathered() if hasattr(x, "gathered") else x
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def check(write, sizes, scheme, keep):
    torch.manual_seed(0)
    dense, x = Model(write).double(), torch.randn(6, 8, dtype=torch.float64)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(sizes)), scheme=scheme, keep=keep, example=x)
    for is_training in (True, False, True):
        for each in (model, dense):
            each.zero_grad()
        with torch.set_grad_enabled(is_training):
            y, expected = model(x), dense(x)
        torch.testing.assert_close(plain(y), expected)
        if is_training:
            y.square().mean().backward()
            expected.square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), dense.named_parameters(), strict=True):
            torch.testing.assert_close(plain(p), q[1], msg=name)
            if is_training:
                torch.testing.assert_close(plain(p.grad), q[1].grad, msg=f"gradient of {name}")


@pytest.mark.parametrize("write", [replaced, in_place, without_grad])
def test_parameters_take_what_forward_writes(ranks, write):
    ranks(2).run(check, write, {"x": 2}, "1d-sp", ())
    ranks(2).run(check, write, {"z": 2}, "3d", ("masked", "first"))


def held_before(model, x):
    gain = model.gain
    model.gain.data = model.gain.data * 0.5
    return x * gain


def swapped(model, x):
    model.gain.data, model.bias.data = model.bias.data, model.gain.data
    return x * model.gain + model.bias


def behind_its_use(model, x):
    y = x * model.gain * model.bias
    model.bias.data = model.bias.data + 1.0
    return y


def repeated(model, x):
    for _ in range(3):
        model.gain.data = model.gain.data.clamp(0.1, 0.5)
        model.bias.data = model.bias.data / 2
        x = x * model.gain + model.bias
    return x


class Orders(nn.Module):
    """A forward that writes to its parameters in some order."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        return self.last(self.way(self, self.first(x)))


def check_orders(sizes, scheme):
    for way in (held_before, swapped, behind_its_use, repeated):
        torch.manual_seed(0)
        dense, x = Orders(way).double(), torch.randn(6, 8, dtype=torch.float64)
        model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(sizes)), scheme=scheme, example=x)
        y, expected = model(x), dense(x)
        torch.testing.assert_close(plain(y), expected, msg=way.__name__)
        y.square().mean().backward()
        expected.square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(plain(p), q, msg=f"{way.__name__}: {name}")
            if way is not behind_its_use:  # where the saved dense parameter sees what was written after its use
                torch.testing.assert_close(plain(p.grad), q.grad, msg=f"{way.__name__}: gradient of {name}")


@pytest.mark.parametrize(("sizes", "scheme"), [({"x": 2}, "1d"), ({"z": 2}, "3d")])
def test_parameters_are_written_in_any_order(ranks, sizes, scheme):
    ranks(2).run(check_orders, sizes, scheme)


def on_one_rank(model, x):
    if torch.distributed.get_rank(model.group) == 0:
        model.gain.data = model.gain.data * 0.5
    return x * model.gain


def narrowed(model, x):
    model.gain.data = model.gain.data.bfloat16()
    return x * model.gain


def check_refused():
    mesh, x = mesh_of(Grid(x=2)), torch.randn(6, 8)
    model = Orders(on_one_rank)
    model.group = mesh.group(("x",))
    model = ndtp.parallelize(model, mesh, scheme="1d", example=x)
    with pytest.raises(ndtp.MismatchError, match="weight 'gain'"):
        for _ in range(2):
            model(x)
    model = ndtp.parallelize(Orders(held_before), mesh, scheme="1d", example=x)
    model.way = narrowed
    with pytest.raises(ndtp.LayoutError, match=r"changes 'gain', \(8,\) of torch\.float32, .* torch\.bfloat16"):
        model(x)


def test_other_kinds_and_writes_of_one_rank_are_named(ranks):
    ranks(2).run(check_refused)


class SetUp(nn.Module):
    """Its first forward, which it knows by a number, sets up a parameter."""

    def __init__(self, way):
        super().__init__()
        self.up, self.down, self.way = nn.Linear(5, 12), nn.Linear(12, 3), way
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.calls.item() == 0:
            with torch.no_grad():
                self.way(self.scale)
        self.calls += 1
        return self.down(self.up(x) * self.scale)


def check_set_up():
    for way in (
        lambda p: p.mul_(3),
        lambda p: p.copy_(p * 3),
        lambda p: p[2:5].fill_(2.0),
        lambda p: setattr(p, "data", p.data * 3),
        lambda p: nn.functional.threshold(p.sub_(1.0), 0.2, 0.5, True),
        lambda p: nn.init.constant_(tensor=p, val=p.sum().item()),
        lambda p: torch._foreach_mul_([p.data], 3.0),
        lambda p: torch.mul(p, 3.0, out=p.detach()),
    ):
        torch.manual_seed(0)
        dense, x = SetUp(way), torch.linspace(-1, 1, 20).view(4, 5)
        model = ndtp.parallelize(copy.deepcopy(dense), ndtp.ProcessGrid(ndtp.Grid(x=2)), scheme="1d")
        for _ in range(2):
            found, expected = model(x), dense(x)
            torch.testing.assert_close(found.gathered() if hasattr(found, "gathered") else found, expected)
        torch.testing.assert_close(model.scale.full_tensor(), dense.scale)


def test_a_first_forward_writes_once(ranks):
    ranks(2).run(check_set_up)


def test_functions_that_call_others_run_while_parameters_are_kept():
    """Neither `torch.cond` nor flex attention runs under a mode of operations that does not know them."""
    p, q = nn.Parameter(torch.ones(3)), torch.linspace(-1, 1, 128).view(1, 2, 8, 8)
    can_write = torch.__version__ >= "2.12"  # a branch, to what it is not given
    with torch.no_grad(), parameters_kept([p]):
        torch.cond(q.sum() > 0, lambda x: x + (p.mul_(2) if can_write else p).sum(), lambda x: x - 1, (q,))
        flex_attention(q, q, q)
        p[1:].zero_()
    assert torch.equal(p, torch.ones(3))
