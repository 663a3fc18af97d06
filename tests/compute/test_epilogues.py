"""What follows a product, by torch and by the kernels' package, against fp64; and torch's own backward formulas."""

from __future__ import annotations

import pytest
import torch

from ndtp.compute.epilogues import ACTIVATIONS, GATES
from ndtp.compute.gemm import KernelGemm, TorchGemm

GEMMS = pytest.mark.parametrize("gemm", [TorchGemm(), KernelGemm()], ids=["torch", "kernels"])
# Half a unit in the last place, for one rounding of the result; fp32 sums a few terms besides.
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
NAMES = pytest.mark.parametrize("name", [name for name, each in ACTIVATIONS.items() if each.width == 1])


def real(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def assert_rounded_once(got, want, dtype):
    assert got.dtype is dtype and got.shape == want.shape
    bound = ROUNDING[dtype] * want.abs() * 1.01 + max(ROUNDING[dtype] * 1e-3, 1e-6 if dtype != torch.float64 else 0)
    difference = (got.double() - want).abs()
    assert bool((difference <= bound).all()), f"off by {(difference - bound).max()}"


def autograd(pre, grad, name):
    """(activated, gradient of pre) by torch's autograd, in pre's dtype."""
    leaf = pre.clone().requires_grad_()
    activated = ACTIVATIONS[name].forward(leaf)
    return activated.detach(), torch.autograd.grad(activated, leaf, grad)[0]


@NAMES
@DTYPES
def test_torch_is_what_eager_torch_does_to_the_bit(name, dtype):
    pre, grad = real(6, 33, dtype=dtype), real(7, 33, dtype=dtype)[1:]
    activated, gradient = autograd(pre, grad, name)
    assert torch.equal(TorchGemm().activate(pre, name), activated)
    assert torch.equal(TorchGemm().activate_backward(grad, pre, name), gradient)


@GEMMS
@DTYPES
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_results_are_put_where_they_are_wanted(gemm, name, dtype):
    """To the bit what comes without `out`; in a part of a bigger tensor, as of one that is gathered."""
    width = ACTIVATIONS[name].width
    pre, grad = real(6, 8 * width, dtype=dtype), real(6, 8, dtype=dtype)
    for function, tensors in ((gemm.activate, (pre,)), (gemm.activate_backward, (grad, pre))):
        want = function(*tensors, name).clone()
        whole = torch.full((3, *want.shape), torch.nan, dtype=dtype)
        got = function(*tensors, name, whole[1])
        assert got.data_ptr() == whole[1].data_ptr() and got.shape == want.shape
        assert torch.equal(whole[1], want), "what is put is what was given without"
        assert whole[0].isnan().all() and whole[2].isnan().all(), "nothing beside it"


@GEMMS
@DTYPES
@pytest.mark.parametrize("name", GATES)
def test_gates_take_turns_with_what_they_gate(gemm, name, dtype):
    """Columns 2j and 2j + 1 make column j, by torch's own operations in either package."""
    pre, grad = real(6, 34, dtype=dtype), real(7, 17, dtype=dtype)[1:]
    activated, gradient = autograd(pre, grad, name)
    assert torch.equal(activated, ACTIVATIONS[GATES[name]].forward(pre[:, 0::2]) * pre[:, 1::2])
    assert torch.equal(gemm.activate(pre, name), activated)
    assert torch.equal(gemm.activate_backward(grad, pre, name), gradient)
    stacked, bias = real(3 * 6, 34, dtype=dtype), real(34, dtype=dtype)
    whole, activated = gemm.reduce_blocks_activate(stacked, 3, bias, name)
    total = stacked.double().unflatten(0, (3, 6)).sum(0) + bias.double()
    assert_rounded_once(whole, total, dtype)
    assert_rounded_once(activated, ACTIVATIONS[name].forward(total), dtype)
    blocks = real(3 * 6, 17, dtype=dtype)
    gradient, _ = gemm.reduce_blocks_backward(blocks, 3, pre, name)
    assert_rounded_once(gradient, autograd(pre.double(), blocks.double().unflatten(0, (3, 6)).sum(0), name)[1], dtype)


@NAMES
@DTYPES
def test_kernels_activate_with_one_rounding(name, dtype):
    pre, grad = real(6, 33, dtype=dtype), real(7, 33, dtype=dtype)[1:]
    activated, gradient = autograd(pre.double(), grad.double(), name)
    assert_rounded_once(KernelGemm().activate(pre, name), activated, dtype)
    assert_rounded_once(KernelGemm().activate_backward(grad, pre, name), gradient, dtype)


@GEMMS
@NAMES
@DTYPES
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_blocks_are_added_in_fp32_and_finished(gemm, name, dtype, ranks):
    """Blocks of [2, 5, 9]: the result is rounded once, however many there are and whatever follows."""
    stacked, bias = real(ranks * 2, 5, 9, dtype=dtype), real(9, dtype=dtype)
    total = stacked.double().unflatten(0, (ranks, 2)).sum(0)
    assert_rounded_once(gemm.reduce_blocks(stacked, ranks), total, dtype)
    assert_rounded_once(gemm.reduce_blocks(stacked, ranks, bias), total + bias.double(), dtype)
    pre, activated = gemm.reduce_blocks_activate(stacked, ranks, bias, name)
    assert_rounded_once(pre, total + bias.double(), dtype)
    assert_rounded_once(activated, ACTIVATIONS[name].forward(total + bias.double()), dtype)


@GEMMS
@NAMES
@DTYPES
@pytest.mark.parametrize("ranks", [1, 3])
def test_backward_after_a_scatter(gemm, name, dtype, ranks):
    stacked, pre = real(ranks * 2, 5, 9, dtype=dtype), real(2, 5, 9, dtype=dtype)
    total = stacked.double().unflatten(0, (ranks, 2)).sum(0)
    _, want = autograd(pre.double(), total, name)
    grad, bias_grad = gemm.reduce_blocks_backward(stacked, ranks, pre, name)
    assert_rounded_once(grad, want, dtype)
    assert_rounded_once(bias_grad, want.sum((0, 1)), dtype)


@GEMMS
def test_a_sum_that_bf16_would_lose(gemm):
    """256 + 255 times 1: each 1 is less than half a step of bf16 at 256."""
    stacked = torch.ones(256, 4, dtype=torch.bfloat16)
    stacked[0] = 256
    assert torch.equal(gemm.reduce_blocks(stacked, 256), torch.full((1, 4), 511).bfloat16())
    _, bias_grad = gemm.reduce_blocks_backward(stacked, 1, torch.ones_like(stacked), "relu")
    assert torch.equal(bias_grad, torch.full((4,), 511).bfloat16())
