"""What fp8 sums lose in the tensor cores, by a model of them: the figures of docs/kernels.md.

The model: an instruction multiplies 32 elements of K exactly; their sum and the sum so far are aligned to the larger of
the two, and cut off 13 bits behind its leading one.  Not measured on a device.
"""

import pytest
import torch
from ndtp_kernels.launch import PROMOTED_EVERY

PER_INSTRUCTION, BITS = 32, 13


def cut(x, largest):
    unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-300))) - BITS)
    return torch.trunc(x / unit) * unit


def tensor_core_sums(a, b, every):
    """A . B^T, moved to exact sums after each `every` elements of K."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    acc = total.clone()
    for start in range(0, a.shape[1], PER_INSTRUCTION):
        part = a[:, start : start + PER_INSTRUCTION] @ b[:, start : start + PER_INSTRUCTION].T
        largest = torch.maximum(acc.abs(), part.abs())
        acc = cut(acc, largest) + cut(part, largest)
        if (start + PER_INSTRUCTION) % every == 0:
            total, acc = total + acc, torch.zeros_like(acc)
    return total + acc


def error(k, every, positive):
    """Largest error by the largest value."""
    torch.manual_seed(0)
    a, b = (torch.randn(48, k).to(torch.float8_e4m3fn).double() for _ in range(2))
    a, b = (a.abs(), b.abs()) if positive else (a, b)
    want = a @ b.T
    return float((tensor_core_sums(a, b, every) - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("positive", [False, True])
def test_sums_that_are_moved_lose_less_than_a_rounding_to_bf16(positive):
    for k in (1024, 16384):
        assert error(k, PROMOTED_EVERY, positive) < 2**-9


def test_fast_sums_lose_the_more_the_longer_they_are():
    """As documented: 0.3 % at K = 1024, 4 % at 16384 where all products have one sign; a tenth where they have not."""
    print([(k, p, e, error(k, e, p)) for k in (1024, 4096, 16384) for p in (False, True) for e in (k, 512, 128)])
