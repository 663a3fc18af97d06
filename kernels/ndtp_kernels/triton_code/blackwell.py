"""A GEMM for sm_100 whose warps have roles, in Gluon: one warp loads, one multiplies, four store.

The sums lie in tensor memory, two tiles of them: while one is being stored, the next is multiplied into the other.
The barriers, of each stage of the ring of operands, and of each of the two tiles of sums:

    ready, free             bytes of A and B are there; the tensor core has read them
    sums_ready, sums_free   all steps of K are in a tile of sums; it has been read
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RUF005 (Gluon knows no starred lists)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from ndtp_kernels.triton_code.hopper import load_tiles, store_part
from ndtp_kernels.triton_code.tiles import grouped, share_of, stage_of

TILES_OF_SUMS = gl.constexpr(2)


@gluon.jit
def multiply_tiles(
    a_ring,
    b_ring,
    ready,
    free,
    sums,
    sums_ready,
    sums_free,
    first,
    stop,
    stride,
    steps,
    A_ROW_MAJOR: gl.constexpr,
    B_ROW_MAJOR: gl.constexpr,
):
    """The warp that hands products to the tensor core, in the order in which the loader loads."""
    STAGES: gl.constexpr = a_ring.shape[0]
    at = 0
    for tile in range(first, stop, stride):
        which, round_of = stage_of((tile - first) // stride, TILES_OF_SUMS)
        acc = sums.index(which)
        mbarrier.wait(sums_free.index(which), round_of ^ 1)
        for step in range(steps):
            stage, parity = stage_of(at, STAGES)
            at += 1
            a = a_ring.index(stage)
            b = b_ring.index(stage)
            if not A_ROW_MAJOR:
                a = a.permute((1, 0))
            if not B_ROW_MAJOR:
                b = b.permute((1, 0))
            mbarrier.wait(ready.index(stage), parity)
            tcgen05_mma(a, b, acc, use_acc=step > 0)
            tcgen05_commit(free.index(stage))
        tcgen05_commit(sums_ready.index(which))


@gluon.jit
def store_tiles(
    sums,
    sums_ready,
    sums_free,
    c_desc,
    pre_desc,
    bias,
    c_space,
    first,
    stop,
    stride,
    tiles_m,
    tiles_n,
    N,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    ACT: gl.constexpr,
    SUBTILE: gl.constexpr,
    BIAS: gl.constexpr,
    PRE: gl.constexpr,
):
    """The epilogue: a few columns of the sums after another, beside the products of the next tile."""
    PART: gl.constexpr = BLOCK_N // SUBTILE
    layout: gl.constexpr = get_tmem_reg_layout(
        gl.float32, (BLOCK_M, PART), TensorMemoryLayout((BLOCK_M, PART), col_stride=1), gl.num_warps()
    )
    for tile in range(first, stop, stride):
        tile_m, tile_n = grouped(tile, tiles_m, tiles_n, GROUP_M)
        which, round_of = stage_of((tile - first) // stride, TILES_OF_SUMS)
        mbarrier.wait(sums_ready.index(which), round_of)
        acc = sums.index(which)
        m0 = tile_m * BLOCK_M
        for part in gl.static_range(SUBTILE):
            n0 = tile_n * BLOCK_N + part * PART
            x = acc.slice(part * PART, PART).load(layout)
            if part == SUBTILE - 1:
                mbarrier.arrive(sums_free.index(which))
            store_part(x, c_desc, pre_desc, bias, c_space, m0, n0, N, layout, PART, ACT, BIAS, PRE)
    tma.store_wait(0)


# How tiles are shared out changes with every shape: not a reason to compile anew.
@gluon.jit(do_not_specialize=["residents", "kept"])
def blackwell_kernel(
    A,
    B,
    C,
    pre,
    bias,
    M,
    N,
    K,
    sa,  # of A, B and C: from one row, or for transposed operands column, to the next
    sb,
    sc,
    residents,
    kept,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    SUBTILE: gl.constexpr,
    A_ROW_MAJOR: gl.constexpr,
    B_ROW_MAJOR: gl.constexpr,
    ACT: gl.constexpr,
):
    """C = act(A . B + bias); `pre` takes A . B + bias."""
    BIAS: gl.constexpr = bias is not None
    PRE: gl.constexpr = pre is not None
    dtype: gl.constexpr = A.dtype.element_ty
    out: gl.constexpr = C.dtype.element_ty
    a_shape: gl.constexpr = [BLOCK_M, BLOCK_K] if A_ROW_MAJOR else [BLOCK_K, BLOCK_M]
    b_shape: gl.constexpr = [BLOCK_K, BLOCK_N] if B_ROW_MAJOR else [BLOCK_N, BLOCK_K]
    c_shape: gl.constexpr = [BLOCK_M, BLOCK_N // SUBTILE]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_shape, dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, dtype)
    c_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(c_shape, out)
    a_desc = tma.make_tensor_descriptor(A, [M, K] if A_ROW_MAJOR else [K, M], [sa, 1], a_shape, a_layout)
    b_desc = tma.make_tensor_descriptor(B, [K, N] if B_ROW_MAJOR else [N, K], [sb, 1], b_shape, b_layout)
    c_desc = tma.make_tensor_descriptor(C, [M, N], [sc, 1], c_shape, c_layout)
    # What is not there is handed on as something that is: a partition takes no None.
    pre_desc = c_desc
    if PRE:
        pre_desc = tma.make_tensor_descriptor(pre, [M, N], [sc, 1], c_shape, c_layout)
    vector = bias if BIAS else C

    a_ring = gl.allocate_shared_memory(dtype, [STAGES] + a_shape, a_layout)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES] + b_shape, b_layout)
    c_space = gl.allocate_shared_memory(out, c_shape, c_layout)
    sums = allocate_tensor_memory(
        gl.float32, [TILES_OF_SUMS, BLOCK_M, BLOCK_N], TensorMemoryLayout((BLOCK_M, BLOCK_N), col_stride=1)
    )
    ready = mbarrier.allocate_mbarrier(STAGES)
    free = mbarrier.allocate_mbarrier(STAGES)
    sums_ready = mbarrier.allocate_mbarrier(TILES_OF_SUMS)
    sums_free = mbarrier.allocate_mbarrier(TILES_OF_SUMS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), 1)
        mbarrier.init(free.index(stage), 1)
    for which in gl.static_range(TILES_OF_SUMS):
        mbarrier.init(sums_ready.index(which), 1)
        mbarrier.init(sums_free.index(which), 1)

    first, stop, stride = share_of(gl.program_id(0), residents, kept)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    # fmt: off
    gl.warp_specialize([
        (store_tiles, (
            sums, sums_ready, sums_free, c_desc, pre_desc, vector, c_space, first, stop, stride, tiles_m,
            tiles_n, N, BLOCK_M, BLOCK_N, GROUP_M, ACT, SUBTILE, BIAS, PRE,
        )),
        (multiply_tiles, (
            a_ring, b_ring, ready, free, sums, sums_ready, sums_free, first, stop, stride, steps, A_ROW_MAJOR,
            B_ROW_MAJOR,
        )),
        (load_tiles, (
            a_desc, b_desc, a_ring, b_ring, ready, free, free, first, stop, stride, tiles_m, tiles_n, steps, BLOCK_M,
            BLOCK_N, BLOCK_K, GROUP_M, A_ROW_MAJOR, B_ROW_MAJOR, 1,
        )),
    ], [1, 1], [40, 40])
    # fmt: on
