"""Reduction over p blocks with the epilogues of `kernel_epilogue`.

The second pass of split-K, and what follows a reduce-scatter done as an all-to-all: the p received blocks are added in
fp32, in the order of the ranks, then bias and activation are applied while the sums are in registers.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ndtp_kernels.triton_code.epilogue import along, epilogue


@triton.jit
def reduce_kernel(
    X,
    C,
    aux,
    pre,
    bias,
    M,
    N,
    num_blocks,
    batch_inner,
    sx_part,  # from one block of X to the next
    sx_outer,
    sx_inner,
    sx_m,
    sx_n,
    sc_outer,
    sc_inner,
    sc_m,
    sc_n,
    sc_block,
    c_block,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    C_BLOCKED: tl.constexpr,
    ACT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    tile_n = tile % tiles_n
    which = tile // (tiles_n * tiles_m)
    outer = tl.cast(which // batch_inner, tl.int64)
    inner = tl.cast(which % batch_inner, tl.int64)
    m = (tile // tiles_n) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    mask = (m < M)[:, None] & n_mask[None, :]

    x_rows = outer * sx_outer + inner * sx_inner + tl.cast(m, tl.int64) * sx_m
    x_at = x_rows[:, None] + (tl.cast(n, tl.int64) * sx_n)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in range(num_blocks):
        start = tl.cast(part, tl.int64) * sx_part
        acc += tl.load(X + start + x_at, mask=mask, other=0.0).to(tl.float32)

    c_rows = outer * sc_outer + inner * sc_inner + tl.cast(m, tl.int64) * sc_m
    c_at = c_rows[:, None] + along(n, sc_n, c_block, sc_block, C_BLOCKED == 2)[None, :]
    c = epilogue(acc, c_at, mask, n, n_mask, aux, pre, bias, ACT)
    if ACCUMULATE:
        c += tl.load(C + c_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(C + c_at, c.to(C.dtype.element_ty), mask=mask)
