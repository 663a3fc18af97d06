"""Reduction over p blocks with the epilogues of `kernel_epilogue`.

The second pass of split-K, and what follows a reduce-scatter done as an all-to-all: the p received blocks are added in
fp32, in the order of the ranks, then bias, activation and gate are applied while the sums are in registers.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ndtp_kernels.triton_code.epilogue import along, epilogue


@triton.jit
def reduce_kernel(
    X,
    X2,
    C,
    C2,
    aux,
    aux2,
    pre,
    pre2,
    bias,
    bias2,
    sums,
    sums2,
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
    sa_outer,
    sa_inner,
    sa_m,
    sa_n,
    sa_block,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    C_BLOCKED: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    tile_n = tile % tiles_n
    sum_row = tl.cast(tile // tiles_n, tl.int64)  # batch major, then rows: one row of column sums each
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
    acc2 = acc
    for part in range(num_blocks):
        start = tl.cast(part, tl.int64) * sx_part
        acc += tl.load(X + start + x_at, mask=mask, other=0.0).to(tl.float32)
        if X2 is not None:
            acc2 += tl.load(X2 + start + x_at, mask=mask, other=0.0).to(tl.float32)

    c_rows = outer * sc_outer + inner * sc_inner + along(m, sc_m, c_block, sc_block, C_BLOCKED == 1)
    c_at = c_rows[:, None] + along(n, sc_n, c_block, sc_block, C_BLOCKED == 2)[None, :]
    aux_rows = outer * sa_outer + inner * sa_inner + along(m, sa_m, c_block, sa_block, C_BLOCKED == 1)
    aux_at = aux_rows[:, None] + along(n, sa_n, c_block, sa_block, C_BLOCKED == 2)[None, :]
    c, c2 = epilogue(
        acc, acc2, c_at, aux_at, mask, n, n_mask, sum_row,
        aux, aux2, pre, pre2, bias, bias2, sums, sums2, N, ACT, GATED, BACKWARD,
    )  # fmt: skip
    if ACCUMULATE:
        c += tl.load(C + c_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(C + c_at, c.to(C.dtype.element_ty), mask=mask)
    if C2 is not None:
        tl.store(C2 + c_at, c2.to(C2.dtype.element_ty), mask=mask)
