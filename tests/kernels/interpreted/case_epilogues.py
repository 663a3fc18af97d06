"""Epilogues in the GEMM and in the reduction after a scatter, forward and backward."""

from dataclasses import replace

import pytest
import torch
from ndtp_kernels import products, reductions, reference
from ndtp_kernels.form import Form
from poisoned import POINTER, TMA, TMA_HALVES, assert_close, integers, triton_options

ACTIVATIONS = reference.ACTIVATIONS
CONFIGS = [POINTER, TMA_HALVES, replace(POINTER, split_k=2)]
# One epilogue serves every configuration: all activations through one of them, two through the others.
COMBINED = [(name, POINTER) for name in ACTIVATIONS] + [(name, c) for name in ("gelu", "none") for c in CONFIGS[1:]]
NT = Form(False, True)


def real(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("activation,config", COMBINED, ids=str)
def test_forward(activation, config):
    """bias, activation, residual, and the pre-activation for backward."""
    a, b, bias, residual = real(20, 48), real(36, 48) / 5, real(36), real(20, 36)
    got = products.gemm(
        "gemm", a, b, form=NT, bias=bias, residual=residual, activation=activation, keep_pre=True,
        options=triton_options(config),
    )  # fmt: skip
    want, pre = reference.gemm(a, b, bias, residual, transpose_b=True, activation_name=activation)
    assert_close(got.c, want, dtype=torch.float32)
    assert_close(got.pre, pre, dtype=torch.float32)


@pytest.mark.parametrize(
    "activation,config", [("silu", POINTER), ("none", POINTER), *(("gelu", c) for c in (*CONFIGS[1:], TMA))], ids=str
)
def test_gated_forward(activation, config):
    a, gate, up, bias_g, bias_u = real(2, 20, 48), real(36, 48) / 5, real(36, 48) / 5, real(36), real(36)
    got = products.gemm(
        "gated", a, gate, form=NT, b2=up, bias=bias_g, bias2=bias_u, activation=activation, keep_pre=True,
        options=triton_options(config),
    )  # fmt: skip
    want, *pre = reference.gated_gemm(a, gate, up, bias_g, bias_u, activation_name=activation, transpose_b=True)
    assert_close(got.c, want, dtype=torch.float32)
    assert_close(got.pre, torch.stack(pre), dtype=torch.float32)


def test_gated_weights_of_different_strides():
    a, gate, up = integers(20, 24), integers(12, 24), integers(24, 12).mT
    got = products.gemm("gated", a, gate, form=NT, b2=up, activation="relu", options=triton_options()).c
    assert torch.equal(got, torch.relu(a @ gate.mT) * (a @ up.mT))


@pytest.mark.parametrize("activation,config", COMBINED, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_backward(activation, gated, config):
    """Activation gradient in dgrad's epilogue, bias gradients, and the recomputed activation, in one pass."""
    dc, weight, pre = real(20, 48), real(48, 36) / 5, real(*((2,) if gated else ()), 20, 36)
    got = products.backward_gemm(
        "backward", dc, weight, pre, activation=activation, gated=gated, column_sums=True, recompute=True,
        options=triton_options(config),
    )  # fmt: skip
    d = dc.double() @ weight.double()
    check_backward(got, d, pre, activation, gated)


def check_backward(got, d, pre, activation, gated, dtype=torch.float32):
    gate, up = (pre[0], pre[1]) if gated else (pre, None)
    dx, dup, hidden = reference.backward_epilogue(d, gate, up, activation_name=activation)
    want = torch.stack((dx, dup)) if gated else dx
    sums = want.flatten(1, -2).sum(1) if gated else want.flatten(0, -2).sum(0)
    assert_close(got.c, want, dtype=dtype)
    assert_close(got.pre, hidden, dtype=dtype)
    assert_close(got.column_sums / 10, sums / 10, dtype=torch.float32)


@pytest.mark.parametrize(
    "activation,dtype", [(name, torch.bfloat16) for name in ACTIVATIONS] + [("gelu", torch.float16)], ids=str
)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_half_precision(activation, gated, dtype):
    """The same epilogues on halves: fp32 inside, rounded once at the end."""
    a, weights, bias = real(9, 24, dtype=dtype), (real(2, 20, 24) / 5).to(dtype), real(20, dtype=dtype)
    b, b2 = weights[0], weights[1] if gated else None
    forward = products.gemm(
        "gemm", a, b, form=NT, b2=b2, bias=bias, bias2=bias if gated else None, activation=activation, keep_pre=True,
        options=triton_options(),
    )  # fmt: skip
    if gated:
        want, *pre = reference.gated_gemm(a, b, b2, bias, bias, activation_name=activation, transpose_b=True)
        pre = torch.stack(pre)
    else:
        want, pre = reference.gemm(a, b, bias, activation_name=activation, transpose_b=True)
    assert_close(forward.c, want, dtype=dtype)
    assert_close(forward.pre, pre, dtype=dtype)
    kept, dc, weight = pre.to(dtype), real(9, 16, dtype=dtype), (real(16, 20) / 4).to(dtype)
    backward = products.backward_gemm(
        "b", dc, weight, kept, activation=activation, gated=gated, column_sums=True, recompute=True,
        options=triton_options(),
    )  # fmt: skip
    check_backward(backward, dc.double() @ weight.double(), kept, activation, gated, dtype)


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
    cut = reference.cut(pre, "n", 3)
    got = products.backward_gemm(
        "backward", dc, weight, cut, form=Form(c_blocks="n", num_c_blocks=3), activation="relu", gated=False,
        options=triton_options(),
    )  # fmt: skip
    assert torch.equal(got.c, reference.cut((dc @ weight) * (pre > 0), "n", 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_after_a_scatter(dtype, blocks, gated):
    """Blocks are added in fp32: the result is rounded once, however many there are."""
    x = real(*((2,) if gated else ()), blocks, 3, 7, 129, dtype=dtype)
    bias, bias2, residual = real(129, dtype=dtype), real(129, dtype=dtype), real(3, 7, 129, dtype=dtype)
    arguments = {
        "gated": gated,
        "bias": bias,
        "bias2": bias2 if gated else None,
        "residual": residual,
        "activation": "gelu_tanh",
    }
    got = reductions.reduce("reduce", x, **arguments, keep_pre=True, backend="triton")
    want = reductions.reduce("reduce", x.double(), **arguments, keep_pre=True, backend="torch")
    assert got.c.dtype == dtype
    assert_close(got.c, want.c, dtype=dtype)
    assert_close(got.pre, want.pre, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_backward_after_a_scatter(dtype, blocks, gated):
    x, pre = real(blocks, 2, 21, 65, dtype=dtype), real(*((2,) if gated else ()), 2, 21, 65, dtype=dtype)
    got = reductions.reduce_backward("reduce", x, pre, activation="silu", gated=gated, recompute=True, backend="triton")
    check_backward(got, x.double().sum(0), pre, "silu", gated, dtype)


def test_a_scatter_of_nothing():
    """No rows: empty results and zero bias gradients."""
    got = reductions.reduce_backward("r", real(2, 0, 5), real(0, 5), activation="relu", backend="triton")
    assert got.c.shape == (0, 5)
    assert torch.equal(got.column_sums, torch.zeros(5))


def test_column_sums_do_not_depend_on_the_run():
    """Bit for bit the same, and the same as a sum in the order of the tiles."""
    dc, weight, pre = real(40, 16), real(16, 20), real(40, 20)
    first, second = (
        products.backward_gemm(
            "b", dc, weight, pre, activation="gelu", gated=False, column_sums=True, options=triton_options()
        ).column_sums
        for _ in range(2)
    )
    assert torch.equal(first, second)
