"""The functions that `ndtp` calls: GEMMs with epilogues, gated pairs, and sums after a scatter.

Without gradients and outside torch.compile a call goes straight to the kernels; otherwise through the custom ops of
`ops`, which cost some ten microseconds more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndtp_kernels import products, reductions
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.errors import KernelError
from ndtp_kernels.form import Form, Product
from ndtp_kernels.products import NO_OPTIONS


def _through_op(*tensors: Tensor | None) -> bool:
    if torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check_table(op: str, options: Options) -> None:
    if options.table is not None:
        raise KernelError(op, "a table of one's own does not pass through autograd or torch.compile", "pass a config")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Operands in autocast's dtype, if it is on: inside an op it would have no effect."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) for t in tensors)


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    a_blocks: str | None = None,
    b_blocks: str | None = None,
    c_blocks: str | None = None,
    num_c_blocks: int = 1,
    out: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    return_preactivation: bool = False,
    return_row_sums: bool = False,
    options: Options = NO_OPTIONS,
) -> Any:
    """C = act(A . B + bias) + residual, in one pass, fp32 inside.

    a         [.., M, K]     or [p, .., M, K/p] with a_blocks="k", [p, .., M/p, K] with a_blocks="m"
    b         [.., K, N]     or [p, .., K/p, N] with b_blocks="k", [p, .., K, N/p] with b_blocks="n"
    bias      [N]
    residual  of C's shape
    returns   [.., M, N]     or [p, .., M/p, N] with c_blocks="m", [p, .., M, N/p] with c_blocks="n" (p = num_c_blocks)

    `transpose_a`, `transpose_b`: the last two dims of that operand are swapped in memory.  Leading dims broadcast.
    `accumulate` adds to `out`.  Scales are those of torch._scaled_mm, for fp8 operands.  With `return_preactivation` or
    `return_row_sums` (sums of A over k, the bias gradient in a wgrad) the result is a `Product`.

    Raises:
        KernelError: operands that do not fit together; the message names them and what would work.
    """
    form = Form(transpose_a, transpose_b, a_blocks, b_blocks, c_blocks, num_c_blocks)
    a, b = _autocast(a, b)
    if not _through_op(a, b, bias, residual):
        done = products.gemm(
            "gemm", a, b, form=form, bias=bias, residual=residual, scale_a=scale_a, scale_b=scale_b,
            activation=activation, keep_pre=return_preactivation, row_sums=return_row_sums, out=out,
            accumulate=accumulate, out_dtype=out_dtype, options=options,
        )  # fmt: skip
        return done if return_preactivation or return_row_sums else done.c
    from ndtp_kernels.autograd import ops

    _check_table("gemm", options)
    if out is not None:
        if any(x is not None for x in (bias, residual, scale_a, scale_b)) or activation != "none":
            raise KernelError("gemm", "out= with an epilogue does not pass through autograd or torch.compile", "no out")
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            raise KernelError("gemm", "out= is not differentiable", "detach the operands, or drop out")
        sums = ops.gemm_out(
            a, b, out, accumulate, ops.encode_form(form), num_c_blocks, return_row_sums, ops.encode(options)
        )
        return Product(out, None, None, sums) if return_row_sums else out
    needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, bias, residual))
    keep = return_preactivation or (needs and activation != "none")
    c, pre, sums = ops.gemm(
        a, b, bias, residual, scale_a, scale_b, ops.encode_form(form), num_c_blocks, activation, keep, return_row_sums,
        out_dtype, ops.encode(options),
    )  # fmt: skip
    if not (return_preactivation or return_row_sums):
        return c
    return Product(c, pre if return_preactivation else None, None, sums if return_row_sums else None)


def gated_gemm(
    a: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None,
    *,
    activation: str = "silu",
    transpose_a: bool = False,
    transpose_b: bool = False,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b_gate: Tensor | None = None,
    scale_b_up: Tensor | None = None,
    a_blocks: str | None = None,
    b_blocks: str | None = None,
    c_blocks: str | None = None,
    num_c_blocks: int = 1,
    out_dtype: torch.dtype | None = None,
    return_preactivation: bool = False,
    options: Options = NO_OPTIONS,
) -> Any:
    """act(A . Bg + bg) * (A . Bu + bu) + residual: SwiGLU with "silu", GeGLU with "gelu"; A is read once.

    Shapes and scales are those of `gemm`.  The pre-activation is [2, ..]: gate, then up.  Halves of one weight make
    backward's dA a single product.
    """
    form = Form(transpose_a, transpose_b, a_blocks, b_blocks, c_blocks, num_c_blocks)
    a, b_gate, b_up = _autocast(a, b_gate, b_up)
    tensors = (a, b_gate, b_up, bias_gate, bias_up, residual)
    if not _through_op(*tensors):
        done = products.gemm(
            "gated_gemm", a, b_gate, form=form, b2=b_up, bias=bias_gate, bias2=bias_up, residual=residual,
            scale_a=scale_a, scale_b=scale_b_gate, scale_b2=scale_b_up, activation=activation,
            keep_pre=return_preactivation, out_dtype=out_dtype, options=options,
        )  # fmt: skip
        return done if return_preactivation else done.c
    from ndtp_kernels.autograd import ops

    _check_table("gated_gemm", options)
    keep = return_preactivation or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
    c, pre = ops.gated_gemm(
        a, b_gate, b_up, bias_gate, bias_up, residual, scale_a, scale_b_gate, scale_b_up, ops.encode_form(form),
        num_c_blocks, activation, keep, out_dtype, ops.encode(options),
    )  # fmt: skip
    return Product(c, pre) if return_preactivation else c


def backward_gemm(
    a: Tensor,
    b: Tensor,
    pre: Tensor,
    *,
    activation: str,
    gated: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    a_blocks: str | None = None,
    b_blocks: str | None = None,
    c_blocks: str | None = None,
    num_c_blocks: int = 1,
    return_column_sums: bool = False,
    return_recomputed: bool = False,
    out_dtype: torch.dtype | None = None,
    options: Options = NO_OPTIONS,
) -> Product:
    """The second product's dgrad with the first one's activation gradient in its epilogue: (A . B) * act'(pre).

    a        [.., M, K]     gradient of the block's output
    b        [.., K, N]     the second weight (transposes, blocks and scales as in `gemm`)
    pre      of C's shape, as `gemm` or `gated_gemm` returned it (gated [2, ..]: gate and up)
    returns  Product: c = gradient of pre; column_sums = bias gradients [N] or [2, N]; pre = act(pre) [* up], recomputed
    """
    form = Form(transpose_a, transpose_b, a_blocks, b_blocks, c_blocks, num_c_blocks)
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            return products.backward_gemm(
                "backward_gemm", a, b, pre, form=form, activation=activation, gated=gated, scale_a=scale_a,
                scale_b=scale_b, column_sums=return_column_sums, recompute=return_recomputed, out_dtype=out_dtype,
                options=options,
            )  # fmt: skip
    from ndtp_kernels.autograd import ops

    c, sums, hidden = ops.backward_gemm(
        a, b, pre, scale_a, scale_b, ops.encode_form(form), num_c_blocks, activation, gated, return_column_sums,
        return_recomputed, out_dtype, ops.encode(options),
    )  # fmt: skip
    return Product(c, hidden if return_recomputed else None, sums if return_column_sums else None)


def reduce_blocks(
    x: Tensor,
    bias: Tensor | None = None,
    bias_up: Tensor | None = None,
    *,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_preactivation: bool = False,
    backend: str = "auto",
) -> Any:
    """Finish a product after a scatter: act(sum of blocks + bias) [* (up + bias_up)] + residual, summed in fp32 in
    block order.

    x        [p, .., N], what an all-to-all leaves; gated [2, p, .., N].  After a reduce-scatter p is 1.
    out      [.., N]: where the result goes, contiguous; not with autograd or torch.compile
    returns  [.., N]
    """
    if not _through_op(x, bias, bias_up, residual):
        done = reductions.reduce(
            "reduce_blocks", x, gated=gated, bias=bias, bias2=bias_up, residual=residual, activation=activation,
            keep_pre=return_preactivation, out=out, out_dtype=out_dtype, backend=backend,
        )  # fmt: skip
        return done if return_preactivation else done.c
    if out is not None:
        raise KernelError("reduce_blocks", "out= does not pass through autograd or torch.compile", "no out")
    from ndtp_kernels.autograd import ops_reduce

    needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias, bias_up, residual))
    keep = return_preactivation or (needs and (gated or activation != "none"))
    c, pre = ops_reduce.reduce_blocks(x, bias, bias_up, residual, activation, gated, keep, out_dtype, backend)
    return Product(c, pre) if return_preactivation else c


def reduce_blocks_backward(
    x: Tensor,
    pre: Tensor,
    *,
    activation: str,
    gated: bool = False,
    return_column_sums: bool = True,
    return_recomputed: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Product:
    """Finish dgrad after its scatter: (sum of blocks) * act'(pre), and the bias gradients, in one pass.

    x        [p, .., N] blocks of the gradient of the activation; p = 1 after a reduce-scatter
    pre      [.., N]; gated [2, .., N]: gate and up
    out      of pre's shape: where c goes, contiguous; not with torch.compile
    returns  Product: c = gradient of pre; column_sums [N] or [2, N]; pre = act(pre) [* up], recomputed
    """
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            return reductions.reduce_backward(
                "reduce_blocks_backward", x, pre, activation=activation, gated=gated, column_sums=return_column_sums,
                recompute=return_recomputed, out=out, out_dtype=out_dtype, backend=backend,
            )  # fmt: skip
    if out is not None:
        raise KernelError("reduce_blocks_backward", "out= does not pass through torch.compile", "no out")
    from ndtp_kernels.autograd import ops_reduce

    c, sums, hidden = ops_reduce.reduce_blocks_backward(
        x, pre, activation, gated, return_column_sums, return_recomputed, out_dtype, backend
    )
    return Product(c, hidden if return_recomputed else None, sums if return_column_sums else None)
