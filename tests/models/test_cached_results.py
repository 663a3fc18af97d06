"""What an observed model may not keep: results of tensors without memory, and compilers of its parts."""

import copy
import functools
import warnings

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ndtp.models.observation import observe
from ndtp.models.run_eagerly import compiled_parts_run_eagerly
from ndtp.models.state_beside import kept_beside


@functools.lru_cache(maxsize=4)
def table(length):
    return torch.arange(length)


@functools.cache
def real(length):
    return torch.arange(length)


def decorated(function):
    cached = functools.cache(function)

    @functools.wraps(function)
    def run(*args):
        return cached(*args)

    run.cached = cached
    return run


class Nodes:
    """Has a cache that a class derived from it reaches."""

    @staticmethod
    @functools.cache
    def of(length):
        return torch.arange(length)


class Derived(Nodes):
    pass


class Rotary(nn.Module):
    @decorated
    def both(length):
        return torch.zeros(length), [torch.ones(length)]

    def forward(self, length):
        return table(length), Rotary.both(length), self.positions(length), real, self.nodes().of(length)


def test_what_a_fake_run_left_is_forgotten():
    """A layer's own cache is shared by its copies, of which one is observed."""
    real(3)
    layer = Rotary()
    layer.positions = functools.lru_cache(maxsize=None)(lambda length: torch.arange(length, device="meta"))
    layer.nodes = functools.partial(Derived)
    with kept_beside(nn.Sequential(layer)), FakeTensorMode():
        copy.deepcopy(layer)(3)
    caches = (table, Rotary.both.cached, layer.positions, Nodes.of, real)
    assert [f.cache_info().currsize for f in caches] == [0, 0, 0, 0, 1]


def test_compiled_parts_run_as_they_are_in_copies_too():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend=backend), nn.Linear(2, 2))
    model[1].compile(backend=backend)
    compiled_parts_run_eagerly(model)
    for each in (model, copy.deepcopy(model)):
        each(torch.ones(1, 2))
    assert not compiled


class Turning(nn.Module):
    """Takes a gradient of its own, of another layer each time."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.turns = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x):
        layer = (self.first, self.second)[self.turns]
        self.turns += 1
        x = x.detach().requires_grad_()
        return torch.autograd.grad(layer(x).square().sum(), x)[0]


def test_a_run_that_failed_for_want_of_gradients_is_made_anew():
    assert observe(Turning(), torch.ones(2, 4)).order == ["first"]


class Warns(nn.Sequential):
    """Warns of what it is called with."""

    def forward(self, x):
        warnings.warn("a warning of the code's own", stacklevel=2)
        return super().forward(x)


def test_a_run_that_observes_gives_no_warnings_of_the_code():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert observe(Warns(nn.Linear(4, 4)), torch.ones(2, 4)).order == ["0"]
