"""ndtp's epilogues by the kernels: sums of scattered blocks with every activation, forward and backward."""

import pytest
import torch
from ndtp_kernels.errors import KernelError
from poisoned import assert_close

from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.compute.gemm import KernelGemm

GEMM = KernelGemm(backend="triton")


@pytest.mark.parametrize("name", [name for name, each in ACTIVATIONS.items() if each.kernel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_activation(name, dtype):
    """Three blocks of [7, 129]; the whole range of an activation, and what lies around zero."""
    stacked, bias, pre = torch.randn(21, 129).to(dtype), torch.randn(129).to(dtype), torch.randn(7, 129).to(dtype)
    stacked[:, :40] *= 1e-3
    pre[:, :40] *= 1e-3
    forward, backward = ACTIVATIONS[name][:2]
    total = stacked.double().view(3, 7, 129).sum(0)
    assert_close(GEMM.reduce_blocks(stacked, 3), total, dtype=dtype)
    got_pre, activated = GEMM.reduce_blocks_activate(stacked, 3, bias, name)
    assert_close(got_pre, total + bias.double(), dtype=dtype)
    assert_close(activated, forward(total + bias.double()), dtype=dtype)
    grad, bias_grad = GEMM.reduce_blocks_backward(stacked, 3, pre, name)
    want = backward(total, pre.double())
    assert_close(grad, want, dtype=dtype)
    assert_close(bias_grad, want.sum(0), dtype=dtype)
    assert_close(GEMM.activate(pre, name), forward(pre.double()), dtype=dtype)
    assert_close(
        GEMM.activate_backward(stacked[:7], pre, name), backward(stacked[:7].double(), pre.double()), dtype=dtype
    )


@pytest.mark.parametrize("name", [name for name, each in ACTIVATIONS.items() if each.kernel])
def test_results_are_put_where_they_are_wanted(name):
    """In rows that begin at no multiple of 16 bytes; a call as it is prepared, and as it is repeated."""
    pre, grad = torch.randn(7, 129), torch.randn(7, 129)
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
