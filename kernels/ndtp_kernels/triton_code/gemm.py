"""The GEMM kernel: C = epilogue(A . B), one source for pointers (any strides) and tensor descriptors (TMA).

Operands are addressed by strides, so a transpose is only a swap of two of them.  Each of A, B, C may lie in memory as
blocks along one of its dims (`*_BLOCKED`: 0 not, 1 along rows, 2 along columns).  `batch` is two dims, the inner of
size `batch_inner`; a stride of 0 broadcasts.  Split-K writes fp32 sums at `C + split * sc_split`; `kernel_reduce` adds
them up and runs the epilogue.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ndtp_kernels.triton_code.epilogue import along, epilogue, start_along
from ndtp_kernels.triton_code.tiles import columns, describe, grouped, load_tile, share_of, store_tile


def launch_metadata(grid, kernel, args):
    """Return what Triton's profiler shows of one launch."""
    m, n, k, batch = args["M"], args["N"], args["K"], args["batch"]
    a, b, c = args["A"], args["B"], args["C"]
    num_bytes = batch * (m * k * a.element_size() + n * k * b.element_size() + m * n * c.element_size() * args["SPLIT"])
    return {
        "name": f"gemm [{m} {n} {k}]",
        f"flops{8 * a.element_size()}": 2 * batch * m * n * k,
        "bytes": num_bytes,
    }


# How tiles are shared out changes with every shape: not a reason to compile anew.
@triton.jit(launch_metadata=launch_metadata, do_not_specialize=["residents", "kept"])
def gemm_kernel(
    A,
    B,
    C,
    aux,  # backward: the pre-activation, which lies as C does
    pre,
    bias,
    M,
    N,
    K,
    batch,
    batch_inner,
    k_run,  # a stretch of K in which no operand crosses into another block
    sa_outer,
    sa_inner,
    sa_m,
    sa_k,
    sa_block,
    a_block,
    sb_outer,
    sb_inner,
    sb_k,
    sb_n,
    sb_block,
    b_block,
    sc_outer,
    sc_inner,
    sc_m,
    sc_n,
    sc_block,
    c_block,
    sc_split,
    residents,  # programs that share out the first `kept` tiles; each of the others takes one tile and goes
    kept,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    TMA_C: tl.constexpr,
    RANK_A: tl.constexpr,
    RANK_B: tl.constexpr,
    RANK_C: tl.constexpr,
    A_ROW_MAJOR: tl.constexpr,
    B_ROW_MAJOR: tl.constexpr,
    A_BATCHED: tl.constexpr,
    B_BATCHED: tl.constexpr,
    A_BLOCKED: tl.constexpr,
    B_BLOCKED: tl.constexpr,
    C_BLOCKED: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies the bit patterns of bf16
    SUBTILE: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    per_batch = tiles_m * tiles_n
    run_steps = tl.cdiv(k_run, BLOCK_K)
    steps = run_steps * (K // k_run)

    if TMA:
        # An operand without the batch dim is described with one entry: a stride of 0 is not a TMA stride.
        a_descriptor = describe(
            A, batch if A_BATCHED else 1, M, K, sa_inner if A_BATCHED else 16, sa_m, sa_k, a_block, sa_block,
            RANK_A, A_BLOCKED, A_ROW_MAJOR, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        b_batch = batch if B_BATCHED else 1
        b_stride = sb_inner if B_BATCHED else 16
        b_descriptor = describe(
            B, b_batch, K, N, b_stride, sb_k, sb_n, b_block, sb_block,
            RANK_B, B_BLOCKED, B_ROW_MAJOR, BLOCK_K, BLOCK_N,
        )  # fmt: skip
    c_target = C
    if TMA_C:
        c_target = describe(
            C, batch, M, N, sc_inner, sc_m, 1, c_block, sc_block, RANK_C, C_BLOCKED, True, BLOCK_M, BLOCK_N // SUBTILE
        )

    start, stop, stride = share_of(tl.program_id(0), residents, kept)
    for tile in tl.range(start, stop, stride, flatten=FLATTEN, warp_specialize=SPECIALIZE):
        tile_m, tile_n = grouped(tile % per_batch, tiles_m, tiles_n, GROUP_M)
        part = tile // per_batch
        split = part % SPLIT
        which = part // SPLIT
        outer = tl.cast(which // batch_inner, tl.int64)
        inner = tl.cast(which % batch_inner, tl.int64)
        m0 = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        m = m0 + tl.arange(0, BLOCK_M)
        m_mask = m < M

        if SPLIT == 1:
            first = 0
            last = steps
        else:
            share = tl.cdiv(steps, SPLIT)
            first = min(split * share, steps)
            last = min(first + share, steps)

        if not TMA:
            n = n0 + tl.arange(0, BLOCK_N)
            n_mask = n < N
            a_rows = A + outer * sa_outer + inner * sa_inner + along(m, sa_m, a_block, sa_block, A_BLOCKED == 1)
            b_column = outer * sb_outer + inner * sb_inner + along(n, sb_n, b_block, sb_block, B_BLOCKED == 2)

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(first, last):
            if TMA:
                k0 = step * BLOCK_K
                a_which = which if A_BATCHED else 0
                b_which = which if B_BATCHED else 0
                a = load_tile(a_descriptor, a_which, m0, k0, a_block, RANK_A, A_BLOCKED, A_ROW_MAJOR, BLOCK_M, BLOCK_K)
                b = load_tile(b_descriptor, b_which, k0, n0, b_block, RANK_B, B_BLOCKED, B_ROW_MAJOR, BLOCK_K, BLOCK_N)
            else:
                # Tiles start anew in every run: a block edge inside a tile would cost a division per element.
                k_in_run = step % run_steps * BLOCK_K
                k0 = step // run_steps * k_run + k_in_run
                k = tl.arange(0, BLOCK_K)
                # Where runs are whole tiles a tile starts as far into its block as one does: known to be aligned, its
                # loads are wide and asynchronous; the compiler cannot see that through a remainder.
                a_start = start_along(k0, sa_k, a_block, sa_block, A_BLOCKED == 2, BLOCK_K if EVEN_K else 1)
                b_start = start_along(k0, sb_k, b_block, sb_block, B_BLOCKED == 1, BLOCK_K if EVEN_K else 1)
                a_at = a_rows[:, None] + (a_start + tl.cast(k, tl.int64) * sa_k)[None, :]
                b_at = (b_start + tl.cast(k, tl.int64) * sb_k)[:, None] + b_column[None, :]
                if EVEN_M and EVEN_K:
                    a = tl.load(a_at)
                elif EVEN_K:
                    a = tl.load(a_at, mask=m_mask[:, None], other=0.0)
                else:
                    a = tl.load(a_at, mask=m_mask[:, None] & (k_in_run + k < k_run)[None, :], other=0.0)
                if EVEN_N and EVEN_K:
                    b = tl.load(B + b_at)
                elif EVEN_K:
                    b = tl.load(B + b_at, mask=n_mask[None, :], other=0.0)
                else:
                    b = tl.load(B + b_at, mask=(k_in_run + k < k_run)[:, None] & n_mask[None, :], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision="ieee")

        c_base = tl.cast(split, tl.int64) * sc_split + outer * sc_outer + inner * sc_inner
        c_rows = c_base + tl.cast(m, tl.int64) * sc_m
        for part_n in tl.static_range(SUBTILE):
            # A few columns after another: fewer registers, and a smaller staging buffer for the stores.
            x = columns(acc, part_n, SUBTILE)
            c_column = n0 + part_n * (BLOCK_N // SUBTILE)
            n_out = c_column + tl.arange(0, BLOCK_N // SUBTILE)
            n_out_mask = n_out < N
            mask = m_mask[:, None] & n_out_mask[None, :]
            c_at = c_rows[:, None] + along(n_out, sc_n, c_block, sc_block, C_BLOCKED == 2)[None, :]
            c = epilogue(x, c_at, mask, n_out, n_out_mask, aux, pre, bias, ACT)
            if ACCUMULATE:
                c += tl.load(C + c_at, mask=mask, other=0.0).to(tl.float32)
            if TMA_C:
                store_tile(c_target, c.to(C.dtype.element_ty), which, m0, c_column, c_block, RANK_C, C_BLOCKED)
            else:
                tl.store(C + c_at, c.to(C.dtype.element_ty), mask=mask)
