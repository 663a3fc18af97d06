"""Products of experts: rows sorted by expert, each expert's by a matrix of its own; pointers or tensor descriptors.

    rows    C[rows of e] = A[rows of e] . B[e]       forward, and dgrad with the weight turned
    outer   C[e] = A[rows of e]^T . B[rows of e]     wgrad; zeros where an expert has no rows

Where each expert's rows begin is in memory, `offsets` [experts + 1], and known to the kernels alone: the host launches
as many programs as there are tiles at most, or multiprocessors, and a program finds what its tiles are.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ndtp_kernels.triton_code.tiles import columns, describe, grouped, load_tile


@triton.jit
def tiles_up_to(offsets, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return [EXPERTS]: the running count of row tiles over experts; a tile has rows of one expert only."""
    e = tl.arange(0, EXPERTS)
    inside = e < experts
    begin = tl.load(offsets + e, mask=inside, other=0)
    end = tl.load(offsets + e + 1, mask=inside, other=0)
    return tl.cumsum((end - begin + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit(do_not_specialize=["rows"])  # another number in each step: not a reason to compile anew
def grouped_rows_kernel(
    A,
    B,
    C,
    offsets,
    rows,
    experts,
    N,
    K,
    sa_m,
    sa_k,
    sb_e,
    sb_k,
    sb_n,
    sc_m,
    sc_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two
    TMA: tl.constexpr,
    A_ROW_MAJOR: tl.constexpr,
    B_ROW_MAJOR: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies the bit patterns of bf16
    SUBTILE: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    ends = tiles_up_to(offsets, experts, EXPERTS, BLOCK_M) * tiles_n
    if TMA:
        a_descriptor = describe(A, 1, rows, K, 16, sa_m, sa_k, 1, 16, 2, 0, A_ROW_MAJOR, BLOCK_M, BLOCK_K)
        # With the experts as a dim of its own: past the edge of a matrix there are zeros, and not the next one.
        b_descriptor = describe(B, experts, K, N, sb_e, sb_k, sb_n, 1, 16, 4, 0, B_ROW_MAJOR, BLOCK_K, BLOCK_N)

    for tile in tl.range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        before = ends <= tile
        expert = tl.sum(before.to(tl.int32), 0)
        first_tile = tl.max(tl.where(before, ends, 0), 0)
        first = tl.load(offsets + expert)
        num_rows = tl.load(offsets + expert + 1) - first
        tile_m, tile_n = grouped(tile - first_tile, tl.cdiv(num_rows, BLOCK_M), tiles_n, GROUP_M)
        m0 = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        m = tl.arange(0, BLOCK_M)
        # 64 bits for where a tile begins alone: for every element they would take all registers.
        row = tl.cast(first + m0, tl.int64)
        m_mask = (m < num_rows - m0)[:, None]

        if not TMA:
            n = tl.arange(0, BLOCK_N)
            k = tl.arange(0, BLOCK_K)
            n_mask = (n < N - n0)[None, :]
            a_at = A + row * sa_m + (m[:, None] * sa_m + k[None, :] * sa_k)
            b_at = B + tl.cast(expert, tl.int64) * sb_e + tl.cast(n0, tl.int64) * sb_n
            b_at = b_at + (k[:, None] * sb_k + n[None, :] * sb_n)

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            if TMA:
                # Rows behind the expert's are those of another, and not stored.
                a = load_tile(a_descriptor, 0, first + m0, k0, 1, 2, 0, A_ROW_MAJOR, BLOCK_M, BLOCK_K)
                b = load_tile(b_descriptor, expert, k0, n0, 1, 4, 0, B_ROW_MAJOR, BLOCK_K, BLOCK_N)
            else:
                k_mask = k < K - k0
                if EVEN_K:
                    a = tl.load(a_at, mask=m_mask, other=0.0)
                else:
                    a = tl.load(a_at, mask=m_mask & k_mask[None, :], other=0.0)
                if EVEN_N and EVEN_K:
                    b = tl.load(b_at)
                elif EVEN_K:
                    b = tl.load(b_at, mask=n_mask, other=0.0)
                else:
                    b = tl.load(b_at, mask=k_mask[:, None] & n_mask, other=0.0)
                a_at += BLOCK_K * sa_k
                b_at += BLOCK_K * sb_k
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision="ieee")

        for part in tl.static_range(SUBTILE):
            at = part * (BLOCK_N // SUBTILE)
            n_out = tl.arange(0, BLOCK_N // SUBTILE)
            mask = m_mask & (n_out < N - n0 - at)[None, :]
            c_at = C + row * sc_m + tl.cast(n0 + at, tl.int64) * sc_n + (m[:, None] * sc_m + n_out[None, :] * sc_n)
            tl.store(c_at, columns(acc, part, SUBTILE).to(C.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def grouped_outer_kernel(
    A,
    B,
    C,
    offsets,
    rows,
    experts,
    M,
    N,
    sa_k,
    sa_m,
    sb_k,
    sb_n,
    sc_e,
    sc_m,
    sc_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    A_ROW_MAJOR: tl.constexpr,  # of [M, rows], as the product has it
    B_ROW_MAJOR: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    UPCAST: tl.constexpr,
    SUBTILE: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    per_expert = tiles_m * tiles_n
    if TMA:
        a_descriptor = describe(A, 1, M, rows, 16, sa_m, sa_k, 1, 16, 2, 0, A_ROW_MAJOR, BLOCK_M, BLOCK_K)
        b_descriptor = describe(B, 1, rows, N, 16, sb_k, sb_n, 1, 16, 2, 0, B_ROW_MAJOR, BLOCK_K, BLOCK_N)

    for tile in tl.range(tl.program_id(0), experts * per_expert, tl.num_programs(0)):
        expert = tile // per_expert
        tile_m, tile_n = grouped(tile % per_expert, tiles_m, tiles_n, GROUP_M)
        first = tl.load(offsets + expert)
        num_rows = tl.load(offsets + expert + 1) - first
        m0 = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        m = tl.arange(0, BLOCK_M)
        n = tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        m_mask = (m < M - m0)[:, None]
        n_mask = (n < N - n0)[None, :]
        a_from = A + tl.cast(m0, tl.int64) * sa_m + (m[:, None] * sa_m + k[None, :] * sa_k)
        b_from = B + tl.cast(n0, tl.int64) * sb_n + (k[:, None] * sb_k + n[None, :] * sb_n)
        a_at = a_from + tl.cast(first, tl.int64) * sa_k
        b_at = b_from + tl.cast(first, tl.int64) * sb_k

        # Whole steps alone: the rows behind an expert's last one are another's, and are left out after the loop.
        whole = num_rows // BLOCK_K * BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, whole, BLOCK_K):
            if TMA:
                a = load_tile(a_descriptor, 0, m0, first + k0, 1, 2, 0, A_ROW_MAJOR, BLOCK_M, BLOCK_K)
                b = load_tile(b_descriptor, 0, first + k0, n0, 1, 2, 0, B_ROW_MAJOR, BLOCK_K, BLOCK_N)
            else:
                if EVEN_M:
                    a = tl.load(a_at)
                else:
                    a = tl.load(a_at, mask=m_mask, other=0.0)
                if EVEN_N:
                    b = tl.load(b_at)
                else:
                    b = tl.load(b_at, mask=n_mask, other=0.0)
                a_at += BLOCK_K * sa_k
                b_at += BLOCK_K * sb_k
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if whole < num_rows:
            k_mask = k < num_rows - whole
            last = tl.cast(first + whole, tl.int64)
            a = tl.load(a_from + last * sa_k, mask=m_mask & k_mask[None, :], other=0.0)
            b = tl.load(b_from + last * sb_k, mask=k_mask[:, None] & n_mask, other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision="ieee")

        for part in tl.static_range(SUBTILE):
            at = part * (BLOCK_N // SUBTILE)
            n_out = tl.arange(0, BLOCK_N // SUBTILE)
            mask = m_mask & (n_out < N - n0 - at)[None, :]
            c_at = (
                C + tl.cast(expert, tl.int64) * sc_e + tl.cast(m0, tl.int64) * sc_m + tl.cast(n0 + at, tl.int64) * sc_n
            )
            c_at = c_at + (m[:, None] * sc_m + n_out[None, :] * sc_n)
            tl.store(c_at, columns(acc, part, SUBTILE).to(C.dtype.element_ty), mask=mask)
