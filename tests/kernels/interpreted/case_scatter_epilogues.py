"""ndtp's epilogues by the kernels: sums of scattered blocks with every activation, forward and backward."""

import pytest
import torch
from ndtp_kernels.errors import KernelError
from poisoned import assert_close

from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.compute.gemm import KernelGemm

GEMM = KernelGemm(backend="triton")


# One plain activation and one gate in all dtypes; the others' formulas are in case_epilogues.
NAMES = ("squared_relu", "swiglu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_finished(name, dtype):
    """Three blocks, of rows and columns that no tile divides."""
    forward, backward, _, width = ACTIVATIONS[name]
    blocks, bias = torch.randn(3, 19, 130 * width).to(dtype), torch.randn(130 * width).to(dtype)
    grads, total = torch.randn(3, 19, 130).to(dtype), blocks.double().sum(0) + bias.double()
    for keep in (False, True):
        pre, activated = GEMM.finish(blocks, bias, name, keep)
        assert_close(activated, forward(total), dtype=dtype)
    assert_close(pre, total, dtype=dtype)
    assert_close(GEMM.finish_backward(grads, pre, name), backward(grads.double().sum(0), pre.double()), dtype=dtype)


@pytest.mark.parametrize("name", [name for name, each in ACTIVATIONS.items() if each.kernel and each.width == 2])
def test_gates(name):
    """Of every activation: gate and up in turns, without a sum and without a bias."""
    pre, grad = torch.randn(5, 66), torch.randn(5, 33)
    assert_close(GEMM.activate(pre, name), ACTIVATIONS[name].forward(pre.double()), dtype=torch.float32)
    want = ACTIVATIONS[name].backward(grad.double(), pre.double())
    assert_close(GEMM.activate_backward(grad, pre, name), want, dtype=torch.float32)


@pytest.mark.parametrize("name", ["gelu", "geglu"])
def test_results_are_put_where_they_are_wanted(name):
    """In rows that begin at no multiple of 16 bytes; a call as it is prepared, and as it is repeated."""
    pre, grad = torch.randn(7, 129 * ACTIVATIONS[name].width), torch.randn(7, 129)
    for function, tensors in ((GEMM.activate, (pre,)), (GEMM.activate_backward, (grad, pre))):
        want = function(*tensors, name)
        for part in (1, 1, 0, 2):
            whole = torch.full((3, *want.shape), torch.nan)
            function(*tensors, name, whole[part])
            assert torch.equal(whole[part], want)
            assert whole.isnan().sum() == 2 * want.numel(), "nothing beside it"


def test_what_does_not_fit_is_refused():
    pre = torch.randn(7, 129)
    with pytest.raises(KernelError, match="out has shape"):
        GEMM.activate(pre, "gelu", torch.empty(7, 128))
    with pytest.raises(KernelError, match="out has strides"):
        GEMM.activate_backward(pre, pre, "gelu", torch.empty(129, 7).mT)


def test_tanh_keeps_its_digits_near_zero():
    x = torch.logspace(-6, 1, 512)
    got = GEMM.activate(x[None], "tanh")[0].double()
    want = x.double().tanh()
    assert bool(((got - want).abs() <= 4e-6 * want).all())
