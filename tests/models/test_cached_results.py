"""Caches that a run on tensors without memory has filled are emptied, and no others."""

import functools

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ndtp.models.cached_results import forget_fake_results


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


class Rotary(nn.Module):
    @decorated
    def both(length):
        return torch.zeros(length), [torch.ones(length)]


def test_what_a_fake_run_left_is_forgotten():
    real(3)
    with FakeTensorMode():
        table(3), Rotary.both(3)
    forget_fake_results(nn.Sequential(Rotary()))
    assert [f.cache_info().currsize for f in (table, Rotary.both.cached, real)] == [0, 0, 1]
