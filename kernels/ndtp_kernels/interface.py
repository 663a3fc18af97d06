"""The functions that `ndtp` calls: GEMMs with epilogues, and sums after a scatter.

No autograd: `ndtp` calls forward and backward by name, from an `autograd.Function` or a custom op of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ndtp_kernels import products, reductions
from ndtp_kernels.checks import check_gradients
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.form import Form
from ndtp_kernels.products import NO_OPTIONS


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str = "none",
    a_blocks: str | None = None,
    b_blocks: str | None = None,
    c_blocks: int = 1,
    out: Tensor | None = None,
    accumulate: bool = False,
    return_preactivation: bool = False,
    options: Options = NO_OPTIONS,
) -> Any:
    """C = act(A . B + bias), in one pass, fp32 inside.

    a         [.., M, K]     or [p, .., M, K/p] with a_blocks="k", [p, .., M/p, K] with a_blocks="m"
    b         [.., K, N]     or [p, .., K/p, N] with b_blocks="k", [p, .., K, N/p] with b_blocks="n"
    bias      [N]
    returns   [.., M, N]     or, where `c_blocks` is p > 1, p blocks of columns [p, .., M, N/p]

    `transpose_a`, `transpose_b`: the last two dims of that operand are swapped in memory.  Leading dims broadcast.
    `out` may be of another dtype, which the result has then; `accumulate` adds to it.

    With `return_preactivation` the result is a `Product`: c, and pre = A . B + bias.

    Raises:
        KernelError: operands that do not fit together; the message names them and what would work.
    """
    check_gradients("gemm", a, b, bias)
    done = products.gemm(
        "gemm", a, b, form=Form(transpose_a, transpose_b, a_blocks, b_blocks, c_blocks), bias=bias,
        activation=activation, keep_pre=return_preactivation, out=out, accumulate=accumulate,
        options=options,
    )  # fmt: skip
    return done if return_preactivation else done.c


def backward_gemm(
    a: Tensor,
    b: Tensor,
    pre: Tensor,
    *,
    activation: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    a_blocks: str | None = None,
    b_blocks: str | None = None,
    c_blocks: int = 1,
    options: Options = NO_OPTIONS,
) -> Tensor:
    """The second product's dgrad with the first one's activation gradient in its epilogue: (A . B) * act'(pre).

    a        [.., M, K]     gradient of the block's output
    b        [.., K, N]     the second weight (transposes and blocks as in `gemm`)
    pre      of C's shape, as `gemm` returned it
    returns  the gradient of pre
    """
    check_gradients("backward_gemm", a, b, pre)
    return products.backward_gemm(
        "backward_gemm", a, b, pre, form=Form(transpose_a, transpose_b, a_blocks, b_blocks, c_blocks),
        activation=activation, options=options,
    ).c  # fmt: skip


def reduce_blocks(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    pairs: bool = False,
    out: Tensor | None = None,
    return_preactivation: bool = False,
    backend: str = "auto",
) -> Any:
    """Finish a product after a scatter: act(sum of blocks + bias), summed in fp32 in block order.

    x        [p, .., N], what an all-to-all leaves.  After a reduce-scatter p is 1.
    out      [.., N]: where the result goes, contiguous
    pairs    columns 2j and 2j + 1 of x are gate and up of column j: act(gate) * up
    returns  [.., N], or [.., N/2] of pairs; with `return_preactivation` a `Product`: c, and pre = the sum with the bias
    """
    check_gradients("reduce_blocks", x, bias)
    done = reductions.reduce(
        "reduce_blocks", x, bias=bias, activation=activation, pairs=pairs, keep_pre=return_preactivation, out=out,
        backend=backend,
    )  # fmt: skip
    return done if return_preactivation else done.c


def reduce_blocks_backward(
    x: Tensor,
    pre: Tensor,
    *,
    activation: str,
    pairs: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Finish dgrad after its scatter: (sum of blocks) * act'(pre), in one pass.

    x        [p, .., N] blocks of the gradient of the activation; p = 1 after a reduce-scatter
    pre      [.., N]; with `pairs` [.., 2 N], gate and up in turns
    out      of pre's shape: where the result goes, contiguous
    returns  the gradient of pre
    """
    check_gradients("reduce_blocks_backward", x, pre)
    return reductions.reduce_backward(
        "reduce_blocks_backward", x, pre, activation=activation, pairs=pairs, out=out, backend=backend,
    ).c  # fmt: skip
