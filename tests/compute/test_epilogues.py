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
    fp32 = 5e-6 if got.is_cuda else 1e-6  # exponentials of a GPU are approximate, and gates multiply them
    bound = ROUNDING[dtype] * want.abs() * 1.01 + max(ROUNDING[dtype] * 1e-3, fp32 if dtype != torch.float64 else 0)
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


@pytest.mark.cpu
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


@DTYPES
@pytest.mark.parametrize("name", GATES)
def test_gates_take_turns_with_what_they_gate(name, dtype):
    """Columns 2j and 2j + 1 make column j, by torch's own operations."""
    pre, grad = real(6, 34, dtype=dtype), real(7, 17, dtype=dtype)[1:]
    activated, gradient = autograd(pre, grad, name)
    assert torch.equal(activated, ACTIVATIONS[GATES[name]].forward(pre[:, 0::2]) * pre[:, 1::2])
    assert torch.equal(TorchGemm().activate(pre, name), activated)
    assert torch.equal(TorchGemm().activate_backward(grad, pre, name), gradient)


@DTYPES
@pytest.mark.parametrize("name", [name for name, each in ACTIVATIONS.items() if each.kernel])
def test_kernels_activate_with_one_rounding(name, dtype):
    pre, grad = real(6, 33 * ACTIVATIONS[name].width, dtype=dtype), real(7, 33, dtype=dtype)[1:]
    activated, gradient = autograd(pre.double(), grad.double(), name)
    assert_rounded_once(KernelGemm().activate(pre, name), activated, dtype)
    assert_rounded_once(KernelGemm().activate_backward(grad, pre, name), gradient, dtype)


@GEMMS
@DTYPES
@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_are_added_in_fp32_and_finished(gemm, name, dtype, ranks):
    """Blocks of [5, 9 or 18]; by kernels the result is rounded once, however many there are and whatever follows."""
    width = ACTIVATIONS[name].width
    blocks, bias = real(ranks, 5, 9 * width, dtype=dtype), real(9 * width, dtype=dtype)
    total = blocks.double().sum(0) + bias.double()
    grads, fused = real(ranks, 5, 9, dtype=dtype), isinstance(gemm, KernelGemm) and ACTIVATIONS[name].kernel is not None
    assert gemm.fuses(name, dtype) == (fused and dtype is not torch.float64)
    for keep in (False, True):
        pre, activated = gemm.finish(blocks, bias, name, keep)
        if fused:
            assert_rounded_once(activated, ACTIVATIONS[name].forward(total), dtype)
        else:
            once = blocks.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype) + bias
            assert torch.equal(activated, gemm.activate(once, name))
        assert (pre is not None) is keep
    grad = gemm.finish_backward(grads, pre, name)
    if fused:
        assert_rounded_once(pre, total, dtype)
        assert_rounded_once(grad, autograd(pre.double(), grads.double().sum(0), name)[1], dtype)
    else:
        once = grads.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        assert torch.equal(grad, gemm.activate_backward(once, pre, name))


@GEMMS
def test_a_sum_that_bf16_would_lose(gemm):
    """256 + 255 times 1: each 1 is less than half a step of bf16 at 256."""
    blocks = torch.ones(256, 1, 4, dtype=torch.bfloat16)
    blocks[0] = 256
    assert torch.equal(gemm.finish(blocks, None, "relu", False)[1], torch.full((1, 4), 511).bfloat16())


@pytest.mark.parametrize("transposes", [(False, True), (True, False)], ids=str)
def test_products_finished_in_one_pass(transposes):
    """Bias, activation and its gradient in the epilogue; torch's GEMM, gates and float64 have no such kernel."""
    a, w, bias = real(6, 8, dtype=torch.float32), real(10, 8, dtype=torch.float32), real(10, dtype=torch.float32)
    letters = ("k", "m") if transposes[0] else ("m", "k"), ("n", "k") if transposes[1] else ("k", "n"), ("m", "n")
    one, other = a.mT.contiguous() if transposes[0] else a, w if transposes[1] else w.mT.contiguous()
    how = letters, tuple(one.shape), tuple(other.shape)
    pre = a.double() @ w.double().mT + bias.double()
    for keep in (False, True):
        kept, activated = KernelGemm().bound_finish(*how, "gelu", a.dtype)(one, other, bias, keep)
        assert (kept is not None) is keep
        torch.testing.assert_close(activated.double(), ACTIVATIONS["gelu"].forward(pre), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept.double(), pre, atol=1e-5, rtol=1e-5)
    got = KernelGemm().bound_finish_backward(*how, "gelu", a.dtype)(one, other, kept)
    want = ACTIVATIONS["gelu"].backward(pre - bias.double(), pre)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    for gemm, name, dtype in (
        (TorchGemm(), "gelu", a.dtype),
        (KernelGemm(), "swiglu", a.dtype),
        (KernelGemm(), "gelu", torch.float64),
    ):
        assert gemm.bound_finish(*how, name, dtype) is None and gemm.bound_finish_backward(*how, name, dtype) is None
