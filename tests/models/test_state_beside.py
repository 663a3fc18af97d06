"""What a model's code counts and collects outside of its modules: the run that observes the model leaves it alone."""

import random

import numpy as np
import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid
from ndtp.models.state_beside import kept_beside

NUMBER, LISTS, TABLE, LOSSES = 0, [0], {"n": 0}, []
SEEN, PAIR = torch.zeros(()), ([0], "kept")
DRAWS, NUMPY_DRAWS = random.Random(0), np.random.default_rng(0)


class Counter:
    n, ticks = 0, 0

    def tick(self):
        type(self).ticks += 1
        return self.ticks


OWN = Counter()
OWN.n = 0


def number():
    global NUMBER  # noqa: PLW0603
    NUMBER += 1
    return NUMBER


def of_list():
    LISTS[0] += 1
    return LISTS[0]


def of_dict():
    TABLE["n"] += 1
    return TABLE["n"]


def of_function():
    of_function.n += 1
    return of_function.n


of_function.n = 0


def of_class():
    Counter.n += 1
    return Counter.n


def of_object():
    OWN.n += 1
    return OWN.n


def of_method():
    return OWN.tick()


def of_tuple():
    PAIR[0][0] += 1
    return PAIR[0][0]


def of_default(kept=[0]):  # noqa: B006
    kept[0] += 1
    return kept[0]


def counting():
    count = 0

    def of_closure():
        nonlocal count
        count += 1
        return count

    return of_closure


def of_losses():
    LOSSES.append(torch.ones(()))
    return len(LOSSES)


def of_tensor():
    SEEN.add_(1)
    return SEEN.clone()


def drawn():
    return DRAWS.random() + NUMPY_DRAWS.random()


WAYS = [
    number,
    of_list,
    of_dict,
    of_function,
    of_class,
    of_object,
    of_default,
    counting(),
    of_losses,
    of_tensor,
    drawn,
    of_method,
    of_tuple,
]


class Proxy:
    """Answers nothing but to the class that it passes for, as one of a request that is not there."""

    def __getattribute__(self, name):
        raise RuntimeError(f"asked for {name} outside of a request")


class Counted(nn.Module):
    calls, request = 0, Proxy()

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, ids):
        Counted.calls += 1
        factors = [way() for way in WAYS]
        return self.down(self.up(self.table(ids)).tanh()) * (sum(factors) + self.calls)


def patched():
    """A layer whose `forward` was replaced, as libraries do that instrument models."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    layer, given = model[1], model[1].forward
    layer.calls = 0

    def forward(x):
        layer.calls += 1
        return given(x) * layer.calls

    layer.forward = forward
    return model


def counts():
    kept, closure = of_default.__defaults__[0], WAYS[7].__closure__[0]
    found = [NUMBER, LISTS[0], TABLE["n"], of_function.n, Counter.n, OWN.n, kept[0], closure.cell_contents]
    return [*found, len(LOSSES), int(SEEN), Counted.calls, Counter.ticks, PAIR[0][0]]


def drawing():
    return DRAWS.getstate(), NUMPY_DRAWS.bit_generator.state


def check(example):
    ids = torch.arange(24).view(4, 6) % 20
    before, draws = counts(), drawing()
    model = ndtp.parallelize(Counted(), mesh_of(Grid(x=2)), **({"example": ids} if example else {}))
    assert counts() == before and drawing() == draws
    for call in (1, 2):
        model(ids)
        assert counts() == [n + call for n in before]

    dense, model = patched(), ndtp.parallelize(patched(), mesh_of(Grid(x=2)))
    for _ in range(2):
        torch.testing.assert_close(model(ids), dense(ids))
    assert model[1].calls == dense[1].calls == 2


def test_what_refuses_questions_is_asked_none():
    with kept_beside(Counted()):
        TABLE["of a run"] = 1
    assert list(TABLE) == ["n"]


@pytest.mark.parametrize("example", [False, True])
def test_state_beside_a_model_is_that_of_its_own_calls(ranks, example):
    ranks(2).run(check, example)
