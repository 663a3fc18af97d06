"""A sample of the random programs of `programs.py`, of which more are on record, and what they found beside rules."""

import copy

import torch
from programs import run_programs
from torch import nn

import ndtp


def test_programs(ranks):
    """Modules with layers are split by `parallelize`; of others the inputs are split."""
    found = ranks(2).run(run_programs, list(range(20)), 2)[0]
    assert not found.wrong + found.broken
    assert found.compared > 100


class Turned(nn.Module):
    """It gives a view of a tensor that was changed through another view."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = x * 1.5
        turned = y.mT
        turned.select(-2, 0).add_(0.5)
        return turned, self.layer(x)


def check_hooked():
    model = ndtp.parallelize(Turned(), ndtp.ProcessGrid(ndtp.Grid(x=2)), scheme="1d")
    x = torch.ones(2, 4, requires_grad=True)
    turned, _ = model(x)
    turned.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 1.5))
    return True


def test_an_output_that_is_a_changed_view_can_be_watched(ranks):
    """Ranks compare their backwards by hooks on outputs; torch's own on a stale view ends the process."""
    assert all(ranks(2).run(check_hooked))


class Both(nn.Module):
    """Two layers of one input are one product, of which each gives a part."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.one(x).relu_().sum() + self.two(x).relu_().sum()


def check_in_place():
    model = ndtp.parallelize(Both(), ndtp.ProcessGrid(ndtp.Grid(x=2)), scheme="1d")
    model(torch.ones(1, 4)).backward()
    return True


def test_what_layers_give_may_be_changed_in_place(ranks):
    assert all(ranks(2).run(check_in_place))


class Returned(nn.Module):
    """A function without a rule may return its input; what is written to that is written to the input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.up(x) * 1.0
        torch.atleast_2d(h).add_(1.0)
        return self.down(h)


def check_returned():
    torch.manual_seed(0)
    dense, x = Returned(), torch.ones(2, 4)
    expected = dense(x).detach()
    model = ndtp.parallelize(dense, ndtp.ProcessGrid(ndtp.Grid(x=2)), scheme="1d", example=x)
    found = model(x)
    torch.testing.assert_close(found.gathered() if hasattr(found, "gathered") else found, expected)
    return True


def test_what_a_function_returns_of_its_input_is_the_input(ranks):
    assert all(ranks(2).run(check_returned))


class Gate(nn.Module):
    """Two parts of one product: its parameters come in another order than that in which they are kept."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(2, 16)

    def forward(self, x):
        value, gate = self.both(x).chunk(2, -1)
        return value * gate.tanh()


class Three(nn.Module):
    """Sides that change: the second layer takes what the first gives otherwise than that lies."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(2, 16), nn.Linear(16, 6), nn.Linear(6, 16)

    def forward(self, x):
        return self.three(self.two(self.one(x).tanh()).tanh())


def by_its_norm(parameter):
    """Scale a gradient in a hook: a collective, in the order in which gradients come."""
    parameter.grad.mul_(1 / (1 + parameter.grad.norm()))


def check_uneven_rows():
    """Ranks whose rows are padding have one more node in their graph, which breaks ties of autograd otherwise."""
    orders = []
    for kind, hooked in ((Gate, False), (Gate, True), (Three, True)):
        torch.manual_seed(0)
        dense, x = kind().double(), torch.randn(6, 2, dtype=torch.float64)
        model = ndtp.parallelize(copy.deepcopy(dense), ndtp.ProcessGrid(ndtp.Grid(z=2, y=2)), scheme="3d", example=x)
        for each in (dense, model):
            for name, p in each.named_parameters() if hooked else ():
                p.register_post_accumulate_grad_hook(by_its_norm)
                p.register_post_accumulate_grad_hook(lambda _, name=name: orders.append(name))
            each(x.clone().requires_grad_()).square().sum().backward()
        for mine, expected in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
    return orders


def test_gradients_come_in_one_order_on_all_ranks(ranks):
    orders = ranks(4).run(check_uneven_rows, timeout=60)
    assert all(each == orders[0] for each in orders)
