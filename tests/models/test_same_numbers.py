"""Numbers that one rank has otherwise and that no loss of the call shows: each is named by all ranks."""

import random

import numpy as np
import pytest
import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid, MismatchError
from ndtp.runtime.facts import Fingerprint, projection_of


@pytest.mark.parametrize("sizes", [(4096, 16), (128, 1, 32, 32), (4096 * 3,), (5000, 7)], ids=str)
def test_a_sample_of_a_tensor_has_numbers_of_all_of_its_columns(sizes):
    x = torch.ones(sizes)
    before = projection_of(x)
    assert isinstance(before, Fingerprint)
    for column in range(sizes[-1]) if len(sizes) > 1 else ():
        other = x.clone()
        other[..., column] = 2
        assert projection_of(other).square > before.square, column


class Noisy(nn.Module):
    """A Linear with a temperature, and noise from a generator that a model's code may use."""

    def __init__(self, source):
        super().__init__()
        self.first, self.last, self.source = nn.Linear(8, 16), nn.Linear(16, 4), source
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x):
        noise = {"NumPy": np.random.rand, "Python": random.random, None: float}[self.source]()
        return self.last(torch.relu(self.first(x) + noise)) / self.temperature


def said_of(source, change, axis):
    mesh, x = mesh_of(Grid({axis: 2})), torch.ones(4, 8)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    model = ndtp.parallelize(Noisy(source), mesh, example=x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if mesh.rank:
                change(model)
    except MismatchError as error:
        return str(error)


def draws(model):
    np.random.rand(), random.random()


def cools(model):
    model.temperature.mul_(0.5)


def test_generators_of_numpy_and_python_are_compared_where_a_forward_draws_from_them(ranks):
    assert ranks(2).run(said_of, None, draws, "x") == [None, None]
    assert ranks(2).run(said_of, "NumPy", draws, "dp") == [None, None]
    for source, fix in (("NumPy", "np.random.seed with"), ("Python", "random.seed with")):
        for said in ranks(2).run(said_of, source, draws, "x"):
            assert f"random numbers of {source}" in said and fix in said


def test_buffers_are_compared(ranks):
    for said in ranks(2).run(said_of, None, cools, "z"):
        assert "buffer 'temperature': rank 1 has hash" in said and "the same buffers on every rank" in said
    assert ranks(2).run(said_of, None, cools, "dp") == [None, None]
