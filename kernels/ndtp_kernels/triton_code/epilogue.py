"""The epilogue: operations on a tile of fp32 sums between the product (or the reduction) and memory.

One epilogue serves the GEMM, the second pass of split-K and the reduction after a scatter:

    forward         c = act(acc + bias)     [pre = acc + bias, stored only when asked for]
    backward        c = acc * act'(aux)
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normal_tail(x):
    """Return, for the normal distribution with z = |x|: z, exp(-z^2 / 2), and the probability beyond z.

    Their quotient (Mills' ratio) is smooth: a polynomial of degree 9 with the least error in z * tail over 0 .. 5,
    fitted by Lawson's iteration; 4e-7 at most.  z is kept under 15, where the exponential is 0 in fp32; NaN stays.
    """
    z = tl.minimum(tl.abs(x), 15.0, propagate_nan=tl.PropagateNan.ALL)
    ratio = z * -5.87795395e-06 + 1.19182085e-04
    ratio = ratio * z - 1.07060804e-03
    ratio = ratio * z + 5.73423738e-03
    ratio = ratio * z - 2.10341794e-02
    ratio = ratio * z + 5.82282245e-02
    ratio = ratio * z - 1.31035447e-01
    ratio = ratio * z + 2.49543414e-01
    ratio = ratio * z - 3.98900568e-01
    ratio = ratio * z + 4.99999374e-01
    bell = tl.exp2(z * -0.7213475204444817 * z)
    return z, bell, bell * ratio


@triton.jit
def activation(x, ACT: tl.constexpr):
    if ACT == "gelu":  # x times the probability below x
        z, _, tail = normal_tail(x)
        return tl.maximum(x, 0.0) - z * tail
    elif ACT == "gelu_tanh":  # 0.5 (1 + tanh u) is sigmoid(2 u): no tanh without libdevice
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "relu":
        return tl.maximum(x, 0.0)
    elif ACT == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    elif ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "sigmoid":
        return tl.sigmoid(x)
    elif ACT == "tanh":  # near zero the difference of two numbers near 1 would lose the digits that matter
        return tl.where(tl.abs(x) < 0.03, x - x * x * x / 3.0, 2.0 * tl.sigmoid(2.0 * x) - 1.0)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        return x


@triton.jit
def activation_gradient(x, ACT: tl.constexpr):
    if ACT == "gelu":
        z, bell, tail = normal_tail(x)
        below = tail - z * 0.3989422804014327 * bell  # at -z; at z it is 1 less that
        return tl.where(x < 0.0, below, 1.0 - below)
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACT == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "relu2":
        return 2.0 * tl.maximum(x, 0.0)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif ACT == "sigmoid":
        s = tl.sigmoid(x)
        return s * (1.0 - s)
    elif ACT == "tanh":
        s = tl.sigmoid(2.0 * x)
        return 4.0 * s * (1.0 - s)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        return tl.full(x.shape, 1.0, x.dtype)


@triton.jit
def along(index, stride, block, block_stride, BLOCKED: tl.constexpr):
    """Element offsets of `index` along a dim; index i of a blocked dim lies in block i // block."""
    if BLOCKED:
        return tl.cast(index // block, tl.int64) * block_stride + tl.cast(index % block, tl.int64) * stride
    else:
        return tl.cast(index, tl.int64) * stride


@triton.jit
def start_along(index, stride, block, block_stride, BLOCKED: tl.constexpr, ALIGNED: tl.constexpr):
    """`along` of one index, which lies a multiple of ALIGNED into its block."""
    if BLOCKED:
        inside = tl.multiple_of(index % block, ALIGNED)
        return tl.cast(index // block, tl.int64) * block_stride + tl.cast(inside, tl.int64) * stride
    else:
        return tl.cast(index, tl.int64) * stride


@triton.jit
def epilogue(acc, offset, mask, n, n_mask, aux, pre, bias, ACT: tl.constexpr):
    """Turn fp32 sums into what is stored at C; stores the pre-activation itself.  With `aux` it is backward's."""
    if aux is not None:
        x = tl.load(aux + offset, mask=mask, other=0.0).to(tl.float32)
        return acc * activation_gradient(x, ACT)
    else:
        if bias is not None:
            acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        if pre is not None:
            tl.store(pre + offset, acc.to(pre.dtype.element_ty), mask=mask)
        return activation(acc, ACT)
