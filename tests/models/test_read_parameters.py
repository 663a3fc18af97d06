"""Parameters of layers that a model's forward reads: what it does to them it does to the parameters."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.seen = nn.Linear(8, 16), nn.Linear(16, 8), []

    def forward(self, x, what):
        weight, bias = self.last.weight, self.last.bias
        before = what(self, weight, bias) if what in BEFORE else 0
        loss = self.last(torch.tanh(self.first(x))).square().mean()
        return loss * (1 + (before if what in BEFORE else what(self, weight, bias, loss)))


def hooks(model, weight, bias):
    weight.register_hook(lambda grad: 3 * grad)
    bias.register_hook(lambda grad: model.seen.append(tuple(grad.shape)))
    return 0


def freezes(model, weight, bias):
    weight.requires_grad_(False)
    bias.requires_grad = False
    return float(weight.is_leaf)


def sets_gradients(model, weight, bias):
    """As dense code does that adds to what an earlier backward left."""
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones(8)
    return float(model.last.weight.grad.sum())


def takes_them_away(model, weight, bias):
    sets_gradients(model, weight, bias)
    weight.grad = None
    return 0.0 if model.last.weight.grad is None else 1.0


def differentiates(model, weight, bias, loss):
    """The balance of two losses by the gradients of the last layer, as VQGAN has it."""
    found = torch.autograd.grad(loss, [weight, bias, model.first.weight], retain_graph=True)
    alone = torch.autograd.grad(loss, model.last.weight, retain_graph=True, allow_unused=True)
    return sum(each.norm().detach() for each in (*found, *alone))


def goes_back(model, weight, bias, loss):
    loss.backward(retain_graph=True)
    found = weight.grad.norm().detach() + bias.grad.norm().detach()
    model.zero_grad()
    return found


BEFORE = {hooks, freezes, sets_gradients, takes_them_away}
CASES = (hooks, freezes, sets_gradients, takes_them_away, differentiates, goes_back)


def check(sizes, cases):
    mesh, x = mesh_of(Grid(sizes)), torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for what in cases:
        torch.manual_seed(0)
        dense = Model()
        torch.manual_seed(0)
        model = ndtp.parallelize(Model(), mesh)
        for step in range(2):
            losses = [each(x, what) for each in (dense, model)]
            torch.testing.assert_close(float(losses[1]), float(losses[0]), msg=f"{what.__name__}, {step}: the loss")
            for loss in losses:
                loss.backward()
            for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
                where = f"{what.__name__}, step {step}: {name}"
                assert (p.grad is None) == (q.grad is None) and p.requires_grad == q.requires_grad, where
                if q.grad is not None:
                    torch.testing.assert_close(
                        p.grad.full_tensor(), q.grad, msg=lambda text, where=where: f"{where}: {text}"
                    )
        assert model.seen == dense.seen


@pytest.mark.parametrize("sizes", [{"x": 2, "y": 2}, {"z": 2, "y": 2}])
def test_what_code_does_to_what_it_has_read(ranks, sizes):
    ranks(4).run(check, sizes, CASES)


class Inner(nn.Module):
    """It takes steps of an optimizer of its own inside of its forward, with what it reads there."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, foreach):
        with torch.enable_grad():
            self.last(torch.tanh(self.first(x))).square().mean().backward()
            weights = [self.last.weight, self.first.bias]
            optimizer = torch.optim.SGD(weights, 0.5, momentum=0.9, foreach=foreach)
            optimizer.step(), optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_add_([self.first.weight], [dict(self.named_parameters())["first.weight"]], alpha=0.1)
        return self.last(torch.tanh(self.first(x))).square().mean()


def check_inner():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for foreach in (True, False):
        torch.manual_seed(0)
        dense = Inner()
        torch.manual_seed(0)
        model = ndtp.parallelize(Inner(), mesh_of(Grid(x=2)))
        for _ in range(3):
            torch.testing.assert_close(float(model(x, foreach)), float(dense(x, foreach)))


def test_steps_inside_of_a_forward(ranks):
    ranks(2).run(check_inner)


class TwoHeads(nn.Module):
    """Two heads on one input, and a penalty of all weights beside them."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.left(x), self.right(x), sum(p.abs().mean() for p in self.parameters())


def check_unneeded():
    """A loss that needs one head, and not the penalty, gives the other head no gradients."""
    mesh = mesh_of(Grid(dp=2, x=2))
    torch.manual_seed(0)
    dense, x = TwoHeads(), torch.randn(4, 8)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh)
    rows = 2 * mesh.coordinate["dp"]
    for each, given, parts in ((dense, x, 1), (model, x[rows : rows + 2], 2)):
        (each(given)[0].square().mean() / parts).backward()
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == name.startswith("right"), name
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_head_that_no_loss_needs_has_no_gradients(ranks):
    ranks(4).run(check_unneeded)


def check_plain():
    """A plain tensor that lists of the grid are added to counts the write, as torch's autograd wants."""
    parameter = ndtp.parallelize(nn.Sequential(nn.Linear(8, 16)), mesh_of(Grid(x=2)))[0].weight
    plain = torch.zeros(16, 8)
    with torch.no_grad():
        torch._foreach_add_([plain], [parameter])
        torch.testing.assert_close(plain, parameter.full_tensor())
    assert plain._version == 1


def test_writes_to_lists_are_counted(ranks):
    ranks(2).run(check_plain)


class Marked(nn.Linear):
    """A weight with attributes of the model's own, which its code asks for, changes and takes away."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.own, self.small = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(()))
        for i, p in enumerate((self.weight, self.own, self.small)):
            p.gain, p._scale, p.spec, p.once = 2.0 + i, 3.0, "of the code", True

    def forward(self, x):
        y = super().forward(x)
        for p, name in ((self.weight, "weight"), (self.own, "own"), (self.small, "small")):
            y = y * getattr(p, "gain", 1.0) * getattr(p, "_scale", 1.0) * (2.0 if hasattr(p, "once") else 1.0)
            if hasattr(p, "once"):
                del p.once
            p.calls = getattr(p, "calls", 0) + 1
            y = y + getattr(self, name).calls
        return y + self.own + self.small


def check_marks():
    torch.manual_seed(0)
    x, dense = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), Marked(8, 8))
    torch.manual_seed(0)
    x, model = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), Marked(8, 8))
    ndtp.parallelize(model, mesh_of(Grid(x=2)), scheme="1d", example=x)
    for _ in range(3):
        y = model(x)
        torch.testing.assert_close(y.gathered() if hasattr(y, "gathered") else y, dense(x), rtol=1e-4, atol=1e-4)
        assert model[1].weight.calls == dense[1].weight.calls and not hasattr(model[1].own, "once")
        y.sum().backward()


def test_attributes_of_parameters_are_found(ranks):
    ranks(2).run(check_marks)
