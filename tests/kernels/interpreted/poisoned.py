"""Poisoned memory for the interpreted cases: fresh outputs hold NaN, and so does what lies around the operands."""

import pytest
import torch
from ndtp_kernels.choice.problem import Config
from ndtp_kernels.choice.selection import Options

POINTER = Config("pointer", 16, 16, 16, 1, 1, group_m=2)
TMA = Config("tma", 16, 16, 16, 1, 1, group_m=2)
TMA_HALVES = Config("tma", 16, 32, 16, 1, 1, group_m=3, subtile=2)

INTERPRETED = Options(backend="triton")


def triton_options(config=POINTER, **more):
    return Options(backend="triton", config=config, **more)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Uninitialized memory is NaN: an element that a kernel forgets cannot pass for a zero."""
    torch.manual_seed(0)
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(make):
        def fill(*args, **keywords):
            made = make(*args, **keywords)
            return made.fill_(float("nan")) if made.is_floating_point() and made.element_size() > 1 else made

        return fill

    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(new_empty))


def surrounded(x, margin=8):
    """The same values inside a larger buffer of NaN: a read out of bounds cannot pass for a zero either."""
    padded = torch.full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + margin), float("nan"), dtype=torch.float32)
    padded = padded.to(x.dtype)
    inside = padded[..., : x.shape[-2], : x.shape[-1]]
    inside.copy_(x)
    return inside


def integers(*shape, dtype=torch.float32, high=3):
    """Small integers: every sum is exact, so results are compared with ==."""
    return torch.randint(-high, high + 1, shape).to(dtype)


def assert_close(got, want, *, dtype):
    """Equal up to a few roundings of `dtype`, relative to the size of what was summed."""
    steps = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]
    assert got.shape == want.shape, (got.shape, want.shape)
    difference = (got.double() - want.double()).abs()
    bound = steps * (1 + want.double().abs())
    assert bool((difference <= bound).all()), f"max error {difference.max()} at {want.abs().max()}"
