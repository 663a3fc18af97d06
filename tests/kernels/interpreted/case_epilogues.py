"""Epilogues in the GEMM and in the reduction after a scatter, forward and backward."""

from dataclasses import replace

import pytest
import torch
from ndtp_kernels import products, reductions, reference
from ndtp_kernels.form import Form
from poisoned import POINTER, TMA_HALVES, assert_close, integers, triton_options

ACTIVATIONS = reference.ACTIVATIONS
# One epilogue serves every configuration: all activations through one of them, one through the others.
COMBINED = [(name, POINTER) for name in ACTIVATIONS]
COMBINED += [("gelu", config) for config in (TMA_HALVES, replace(POINTER, split_k=2))]
NT = Form(False, True)


def real(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def compare(activation, config, dtype):
    """Bias, activation, and the pre-activation for backward; then its gradient in dgrad's epilogue."""
    a, b, bias = real(20, 32, dtype=dtype), (real(36, 32) / 5).to(dtype), real(36, dtype=dtype)
    options = triton_options(config)
    got = products.gemm("g", a, b, form=NT, bias=bias, activation=activation, keep_pre=True, options=options)
    want, pre = reference.gemm(a, b, bias, transpose_b=True, activation_name=activation)
    assert_close(got.c, want, dtype=dtype)
    assert_close(got.pre, pre, dtype=dtype)
    dc, weight, kept = real(20, 32, dtype=dtype), (real(32, 36) / 5).to(dtype), pre.to(dtype)
    grad = products.backward_gemm("b", dc, weight, kept, activation=activation, options=options).c
    slope = reference.activation_gradient(kept.double(), activation)
    assert_close(grad, (dc.double() @ weight.double()) * slope, dtype=dtype)


@pytest.mark.parametrize("activation,config", COMBINED, ids=str)
def test_forward_and_backward(activation, config):
    compare(activation, config, torch.float32)


@pytest.mark.parametrize(
    "activation,dtype", [("tanh", torch.bfloat16), ("gelu", torch.bfloat16), ("gelu", torch.float16)], ids=str
)
def test_half_precision(activation, dtype):
    """Epilogues on halves: fp32 inside, whatever the activation, rounded once at the end."""
    compare(activation, POINTER, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gelu_and_its_gradient_against_fp64(dtype):
    """Closer than torch's own fp32 GELU, which is 1.1e-6 off, and right at the ends, where torch's gradient is NaN."""
    ends = torch.tensor([torch.inf, -torch.inf, 1e30, -1e30, torch.nan])
    given = torch.cat((torch.linspace(-14, 14, 20475), ends)).to(dtype)
    got = reductions.reduce("r", given.view(1, 16, 1280), activation="gelu", backend="triton").c
    ones = torch.ones(1, 16, 1280, dtype=dtype)
    gradient = reductions.reduce_backward("r", ones, given.view(16, 1280), activation="gelu", backend="triton").c
    x = given[:-5].double()
    below, bell = 0.5 * torch.erfc(-x / 2**0.5), torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5
    rounding = 0.0 if dtype == torch.float32 else 2.0**-7  # the interpreter cuts bf16 off
    for found, want, bound in ((got, x * below, 7e-7), (gradient, below + x * bell, 8e-7)):
        assert bool(((found.flatten()[:-5].double() - want).abs() <= bound + rounding * want.abs()).all())
    assert got.flatten()[-5:-1].tolist() == [torch.inf, 0, given[-3].item(), 0] and got.flatten()[-1].isnan()
    assert gradient.flatten()[-5:-1].tolist() == [1, 0, 1, 0] and gradient.flatten()[-1].isnan()


def test_backward_in_blocks_and_batches():
    """The gradient written as the blocks that a reduce-scatter wants."""
    dc, weight, pre = integers(2, 10, 24), integers(24, 36), integers(2, 10, 36)
    cut, form = reference.cut(pre, 3), Form(c_blocks=3)
    got = products.backward_gemm("b", dc, weight, cut, form=form, activation="relu", options=triton_options()).c
    assert torch.equal(got, reference.cut((dc @ weight) * (pre > 0), 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 4])
def test_after_a_scatter(dtype, blocks):
    """Blocks are added in fp32: the result is rounded once, however many there are."""
    x, bias, pre = real(blocks, 3, 7, 129, dtype=dtype), real(129, dtype=dtype), real(3, 7, 129, dtype=dtype)
    total = x.double().sum(0)
    got = reductions.reduce("r", x, bias=bias, activation="gelu_tanh", keep_pre=True, backend="triton")
    assert got.c.dtype == dtype
    assert_close(got.pre, total + bias.double(), dtype=dtype)
    assert_close(got.c, reference.activation(total + bias.double(), "gelu_tanh"), dtype=dtype)
    grad = reductions.reduce_backward("r", x, pre, activation="silu", backend="triton").c
    assert_close(grad, total * reference.activation_gradient(pre.double(), "silu"), dtype=dtype)


def test_a_scatter_of_nothing():
    assert reductions.reduce("r", real(2, 0, 5), activation="relu", backend="triton").c.shape == (0, 5)
    got = reductions.reduce_backward("r", real(2, 0, 5), real(0, 5), activation="relu", backend="triton").c
    assert got.shape == (0, 5)
