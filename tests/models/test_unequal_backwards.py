"""Backwards of layers that ranks with rows of their own do not all use: broken off, run twice, of several models."""

import copy

import pytest
import torch
from products import mesh_of
from test_unequal_uses import WHICH, check_alike, routed
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import Grid


def break_off(model, mine):
    """A backward that ends in an error."""
    x = mine[0].clone().requires_grad_()
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x, mine[1]).square().mean().backward()


def check_broken():
    """A backward that breaks off leaves nothing behind."""
    mesh = mesh_of(Grid(dp=2))
    model, dense, mine, whole = routed(mesh, "1d")
    break_off(model, mine)
    model.zero_grad()
    for _ in range(2):
        (model(*mine).square().mean() / 2).backward()
        dense(*whole).square().mean().backward()
        check_alike(model, dense)
    assert not mesh.step.partial_sums and not mesh.step.partial_sums.depth


def test_a_backward_that_breaks_off(ranks):
    ranks(2).run(check_broken)


def check_broken_of_another():
    """The grid holds nothing back where the backward of another model broke off."""
    mesh = mesh_of(Grid(dp=2))
    model, _, mine, _ = routed(mesh, "1d")
    torch.manual_seed(1)
    dense = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).double()
    other = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d")
    break_off(model, mine)
    x = torch.randn(8, 16, dtype=torch.float64)
    dense(x).square().mean().backward()
    (other(x.chunk(2)[mesh.coordinate["dp"]]).square().mean() / 2).backward()
    check_alike(other, dense)


def check_two_backwards():
    """Twice of one graph, and of two graphs that were made before either."""
    mesh = mesh_of(Grid(dp=2))
    model, dense, mine, whole = routed(mesh, "1d")
    for net, rows, share in ((dense, whole, 1), (model, mine, 2)):
        loss = net(*rows).square().mean() / share
        loss.backward(retain_graph=True)
        loss.backward()
        first, second = (net(*rows).square().mean() / share for _ in range(2))
        first.backward()
        second.backward()
    check_alike(model, dense)


def check_two_models():
    """A model of equal uses behind one of unequal ones, and two of unequal ones, in one backward."""
    mesh = mesh_of(Grid(dp=2))
    model, dense, mine, whole = routed(mesh, "1d")
    torch.manual_seed(1)
    dense_head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    head = ndtp.parallelize(copy.deepcopy(dense_head), mesh, scheme="1d")
    another = copy.deepcopy(model)
    dense_head(dense(*whole)).square().mean().backward()
    dense(*whole).square().mean().backward()
    loss = head(model(*mine)).square().mean() + another(*mine).square().mean()
    (loss / 2).backward()
    check_alike(head, dense_head)
    for p, other, q in zip(model.parameters(), another.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor() + other.grad.full_tensor(), q.grad)


def check_checkpoint_of_all():
    """A model that a checkpoint runs again in its backward."""
    mesh = mesh_of(Grid(dp=2))
    model, dense, mine, whole = routed(mesh, "1d")
    (dense(*whole).square().mean() * 2).backward()
    loss = model(*mine).square().mean() + checkpoint(model, *mine, use_reentrant=False).square().mean()
    (loss / 2).backward()
    check_alike(model, dense)


def check_reduced():
    """Gradients that were held back and no backward follows."""
    mesh = mesh_of(Grid(dp=2))
    model, dense, mine, whole = routed(mesh, "1d")
    (model(*mine).square().mean() / 2).backward()  # ranks know from here on that their uses differ
    for _ in range(2):
        model.zero_grad(), dense.zero_grad()
        dense(*whole).square().mean().backward()
        with mesh.accumulate():
            (model(*mine).square().mean() / 2).backward()
        assert all(p.grad is None for p in model.parameters())
        mesh.reduce_gradients()
        check_alike(model, dense)


def check_some_inputs():
    """A backward that adds to some parameters alone, of the experts' one of three."""
    mesh = mesh_of(Grid(dp=2))
    model, dense, mine, whole = routed(mesh, "1d")
    for net, rows, share in ((dense, whole, 1), (model, mine, 2)):
        wanted = [*net.inner.parameters(), net.experts[1][0].weight]
        (net(*rows).square().mean() / share).backward(inputs=wanted)
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def check_steps_in_backward():
    """An optimizer's step of each parameter as its gradient is there."""
    mesh = mesh_of(Grid(dp=2))
    model, dense, mine, whole = routed(mesh, "1d")

    @torch.no_grad()
    def step(p):
        p.add_(p.grad, alpha=-0.1)

    for net, rows, share in ((dense, whole, 1), (model, mine, 2)):
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        (net(*rows).square().mean() / share).backward()
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


class Matrices(nn.Module):
    """Experts that are no layers; code reads all of them, and computes with some."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(16, 16)) for _ in range(3)])

    def forward(self, x, which):
        y = h = self.inner(x)
        for i, weight in enumerate(self.experts):
            rows = (which == i).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, h[rows] @ weight)
        return y


def check_matrices():
    mesh = mesh_of(Grid(dp=2))
    torch.manual_seed(0)
    x, dense, at = torch.randn(8, 16, dtype=torch.float64), Matrices().double(), mesh.coordinate["dp"]
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d", example=(x, torch.arange(8) % 3))
    rows, which = x.chunk(2)[at], WHICH.chunk(2)[at]
    for net, given, share in ((dense, (x, WHICH), 1), (model, (rows, which), 2)):
        alike = net(given[0], torch.ones_like(given[1])).square().mean() / share
        other = net(*given).square().mean() / share
        alike.backward()  # of equal uses, before that of others, which were read by then
        other.backward()
    check_alike(model, dense)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "check",
    [
        check_broken_of_another,
        check_two_backwards,
        check_two_models,
        check_checkpoint_of_all,
        check_reduced,
        check_some_inputs,
        check_steps_in_backward,
        check_matrices,
    ],
    ids=lambda each: each.__name__.removeprefix("check_"),
)
def test_other_ways_through_a_backward(ranks, check):
    ranks(2).run(check)
