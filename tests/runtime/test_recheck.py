"""A product that one rank computes wrong in silence is found by another rank, which names it."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ndtp
from ndtp import CorruptionError, Grid, GridError
from ndtp.runtime.recheck import PRODUCTS, Sample, differing


class Flip(TorchDispatchMode):
    """The exponent of one element of one product has a bit that is wrong."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS and result.dtype is torch.float32:
            self.left -= 1
            if self.left == -1:
                first = result.detach()[(0,) * result.dim()].view(torch.int32)
                first ^= 1 << 29
        return result


class Model(nn.Module):
    """Products of layers, and one of activations."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.head(self.down(torch.relu(self.up(x))))
        return (h @ h.mT).sum()


def made(**options):
    torch.manual_seed(0)
    return ndtp.parallelize(Model(), Grid(x=2), scheme="1d", example=torch.ones(4, 8), **options)


def step(model):
    model.zero_grad()
    model(torch.arange(32.0).view(4, 8) / 32).backward()


def flipped():
    """What is said of a bit that is wrong in each of a rank's products of a step, and of none."""
    model, said = made(recheck=1), []
    step(model)
    probe = ndtp.recheck(model)
    assert probe.checked >= probe.products >= 7 and probe.received_bytes and "products" in str(probe)
    for at in (0, 4, 6, 10, 13):  # its own, and what it computes again; the two after 7 are of autograd alone
        try:
            with Flip(at if model.ndtp_report.mesh.rank == 1 else -1):
                step(model)
            said.append(None)
        except CorruptionError as error:
            assert f"a product of {error.module} ({error.phase}) by rank 1 (x=1)" in str(error), error
            said.append((error.module, error.phase, error.ranks))
    ndtp.recheck(model, 0)
    assert ndtp.recheck(model) is None
    return said


@pytest.mark.cpu
def test_a_wrong_bit_is_found_and_named(ranks):
    said, others = ranks(2).run(flipped)
    assert said == others and all(each is not None and each[2] == (1,) for each in said), said
    assert {each[1] for each in said} == {"forward", "dgrad", "wgrad"}, said
    assert {each[0] for each in said} >= {"up", "down"}, said


def sampled():
    model = made(recheck=1 / 10)
    for _ in range(10):
        step(model)
    probe = ndtp.recheck(model)
    return probe.products, probe.checked


def test_so_many_of_all_products_are_computed_again(ranks):
    for products, checked in ranks(2).run(sampled):
        assert products >= 70 and checked == products // 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rounding_is_no_corruption(dtype):
    a, b = (torch.randn(shape, dtype=dtype) for shape in ((8, 96), (96, 8)))
    x, y = (each.to(torch.promote_types(dtype, torch.float32)) for each in (a, b))
    halves = (x[:, :48] @ y[:48] + x[:, 48:] @ y[48:]).to(dtype)  # summed up in another order
    assert differing(Sample("mm", "up", "forward", [a, b], halves)) is None
    wrong = a @ b
    wrong[2, 3] += 1.0
    (theirs, mine), where = differing(Sample("mm", "up", "forward", [a, b], wrong))
    assert theirs and not mine and "element (2, 3)" in where and "1 of 64" in where
    start = torch.full((8, 8), torch.inf, dtype=dtype)  # what is no number is no product to compare
    assert differing(Sample("addmm", "up", "forward", [start, a, b], start + 1)) is None


def test_wrong_use_is_refused():
    with pytest.raises(GridError, match="on no grid"):
        ndtp.recheck(nn.Linear(2, 2), 1)
    with pytest.raises(GridError, match="from 0 to 1"):
        ndtp.recheck(ndtp.ProcessGrid(Grid(x=1)), 1000)
