"""Products whose rows come or go part by part, and the signals between ranks: kernels that wait on the device.

    arrivals    C = A . B of gathered rows: tiles in the order in which parts arrive, one's own first; a tile is begun
                when the flag of its part is up
    departures  C = A . B of rows that are scattered: tiles in the order in which parts are pulled, one's own last; each
                counts for its part when it is stored

A part is the rows of one rank.  Pointers only: what a copy engine has written is ordered before a flag for plain loads,
and a TMA load would need a fence of its own.  Programs that wait hold an SM; what raises flags may need one.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def put_signal_kernel(signal):
    """Up, when it is down: as torch's symmetric memory does it."""
    found = tl.atomic_cas(signal, 0, 1, sem="release", scope="sys")
    while found != 0:
        found = tl.atomic_cas(signal, 0, 1, sem="release", scope="sys")


@triton.jit
def take_signal_kernel(signal):
    """Down, when it is up."""
    found = tl.atomic_cas(signal, 1, 0, sem="acquire", scope="sys")
    while found != 1:
        found = tl.atomic_cas(signal, 1, 0, sem="acquire", scope="sys")


@triton.jit
def wait_for(count, at_least):
    """Wait until a count has reached a value; writes before the count are visible afterwards."""
    # A swap that changes nothing, of a value that no count has.  Adding 0 is no atomic operation after optimization.
    found = tl.atomic_cas(count, -1, -1, sem="acquire", scope="sys")
    while found < at_least:
        found = tl.atomic_cas(count, -1, -1, sem="acquire", scope="sys")


@triton.jit
def wait_for_kernel(count, at_least):
    wait_for(count, at_least)


@triton.jit
def gemm_of_parts_kernel(
    A,
    B,
    C,
    counts,  # int32 [ranks]: flags of parts that have come, or tiles of parts that may go
    rank,
    ranks,
    rows,  # of a part
    N,
    K,
    sa_m,
    sa_k,
    sb_k,
    sb_n,
    sc_m,
    sc_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ARRIVING: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies the bit patterns of bf16
):
    tiles_m = tl.cdiv(rows, BLOCK_M)
    per_part = tiles_m * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), per_part * ranks, tl.num_programs(0)):
        # Parts in order, and tiles of no part before those of an earlier one: `ndtp.collectives.symmetric.protocol`.
        if ARRIVING:
            part = (rank + tile // per_part) % ranks
            wait_for(counts + part, 1)
        else:
            part = (rank + ranks - 1 - tile // per_part) % ranks
        inside = tile % per_part
        first_m = inside % tiles_m * BLOCK_M
        first_n = tl.cast(inside // tiles_m * BLOCK_N, tl.int64)
        row = tl.cast(part, tl.int64) * rows + first_m
        m = tl.arange(0, BLOCK_M)
        n = tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        m_mask = (first_m + m < rows)[:, None]
        n_mask = (first_n + n < N)[None, :]
        # 64 bits for where a tile begins alone: for every element they would take all registers.
        a_at = A + row * sa_m + (m[:, None] * sa_m + k[None, :] * sa_k)
        b_at = B + first_n * sb_n + (k[:, None] * sb_k + n[None, :] * sb_n)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            k_mask = k < K - k0
            a = tl.load(a_at, mask=m_mask & k_mask[None, :], other=0.0)
            b = tl.load(b_at, mask=k_mask[:, None] & n_mask, other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            a_at += BLOCK_K * sa_k
            b_at += BLOCK_K * sb_k
        c_at = C + row * sc_m + first_n * sc_n + (m[:, None] * sc_m + n[None, :] * sc_n)
        tl.store(c_at, acc.to(C.dtype.element_ty), mask=m_mask & n_mask)
        if not ARRIVING:
            tl.debug_barrier()  # all threads have stored, before one of them says so
            tl.atomic_add(counts + part, 1, sem="release", scope="sys")
