"""A GEMM for sm_90 whose warps have roles, in Gluon: one warp loads, groups of warps multiply, each a tile of its own.

With two groups (ping-pong) one stores its tile while the other multiplies.  The tiles of a program go to its groups in
turn, and all steps of K of one tile come before those of the next, in one ring of stages.  With one group of eight
warps a tile may be twice as large, and its epilogue is not hidden.

In a cluster of two programs the tiles lie below one another: both need the same tile of B, which one load brings to
both (multicast).  BLOCK_M is then of the cluster.

The barriers, one of each for every stage of the ring:

    ready       the bytes of A and B are there: the loader's arrival, which says how many, and the bytes
    free        the group has multiplied them: one arrival
    both_free   the groups of both programs have; only the first program, which loads B for both, waits for it

and one of each for every group:

    turn        the other group has seen all steps of its tile arrive.  A barrier is asked for a parity, and one that is
                a round behind gives the answer of one that is done: without turns the second group would take stages
                that the first has not even waited for.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RUF005 (Gluon knows no starred lists)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ndtp_kernels.triton_code.epilogue import activation
from ndtp_kernels.triton_code.tiles import columns, grouped, share_of, stage_of


@gluon.jit
def load_tiles(
    a_desc,
    b_desc,
    a_ring,
    b_ring,
    ready,
    free,
    both_free,
    first,
    stop,
    stride,
    tiles_m,
    tiles_n,
    steps,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    A_ROW_MAJOR: gl.constexpr,
    B_ROW_MAJOR: gl.constexpr,
    CLUSTER: gl.constexpr,
):
    """The loader: every step of K of every tile of this program, in order."""
    STAGES: gl.constexpr = a_ring.shape[0]
    at = 0
    for tile in range(first, stop, stride):
        tile_m, tile_n = grouped(tile, tiles_m, tiles_n, GROUP_M)
        m0 = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        for step in range(steps):
            stage, parity = stage_of(at, STAGES)
            at += 1
            k0 = step * BLOCK_K
            # A new barrier answers for the parity before its first as if that were done: the first round is free.
            mbarrier.wait(free.index(stage), parity ^ 1)
            if CLUSTER > 1:
                mbarrier.wait(both_free.index(stage), parity ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            if A_ROW_MAJOR:
                tma.async_copy_global_to_shared(a_desc, [m0, k0], bar, a_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(a_desc, [k0, m0], bar, a_ring.index(stage))
            if B_ROW_MAJOR:
                tma.async_copy_global_to_shared(b_desc, [k0, n0], bar, b_ring.index(stage), multicast=CLUSTER > 1)
            else:
                tma.async_copy_global_to_shared(b_desc, [n0, k0], bar, b_ring.index(stage), multicast=CLUSTER > 1)


@gluon.jit
def store_part(
    x,
    c_desc,
    pre_desc,
    bias,
    c_space,
    m0,
    n0,
    N,
    layout: gl.constexpr,
    PART: gl.constexpr,
    ACT: gl.constexpr,
    BIAS: gl.constexpr,
    PRE: gl.constexpr,
):
    """The epilogue of some columns of sums, `x` at (m0, n0): C = act(x + bias); `pre` takes x + bias."""
    n = n0 + gl.arange(0, PART, gl.SliceLayout(0, layout))
    if BIAS:
        x += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if PRE:
        # The copy before still reads what it stores.
        tma.store_wait(0)
        c_space.store(x.to(c_space.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(pre_desc, [m0, n0], c_space)
    x = activation(x, ACT)
    tma.store_wait(0)
    c_space.store(x.to(c_space.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m0, n0], c_space)


@gluon.jit
def multiply_tiles(
    a_ring,
    b_ring,
    ready,
    free,
    both_free,
    turn,
    c_desc,
    pre_desc,
    bias,
    c_space,
    group,
    first,
    stop,
    stride,
    tiles_m,
    tiles_n,
    steps,
    N,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    A_ROW_MAJOR: gl.constexpr,
    B_ROW_MAJOR: gl.constexpr,
    ACT: gl.constexpr,
    SUBTILE: gl.constexpr,
    GROUPS: gl.constexpr,
    CLUSTER: gl.constexpr,
    BIAS: gl.constexpr,
    PRE: gl.constexpr,
):
    """A group: each GROUPS-th tile of this program, with its epilogue."""
    STAGES: gl.constexpr = a_ring.shape[0]
    PART: gl.constexpr = BLOCK_N // SUBTILE
    WARPS: gl.constexpr = 8 // GROUPS
    CGA: gl.constexpr = [[1, 0]] if CLUSTER > 1 else []
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16], CGA)
    part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16], CGA)
    for tile in range(first + group * stride, stop, GROUPS * stride):
        tile_m, tile_n = grouped(tile, tiles_m, tiles_n, GROUP_M)
        number = (tile - first) // stride
        at = number * steps
        if GROUPS == 2:
            _, round_of = stage_of(number, GROUPS)
            mbarrier.wait(turn.index(group), round_of ^ 1 ^ group)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for step in range(steps):
            stage, parity = stage_of(at + step, STAGES)
            a = a_ring.index(stage)
            b = b_ring.index(stage)
            if not A_ROW_MAJOR:
                a = a.permute((1, 0))
            if not B_ROW_MAJOR:
                b = b.permute((1, 0))
            mbarrier.wait(ready.index(stage), parity)
            acc = warpgroup_mma(a, b, acc, is_async=True)
            # One product stays in flight: the one before is done, and what it read may be overwritten.
            acc = warpgroup_mma_wait(1, deps=[acc])
            done, _ = stage_of(at + step + STAGES - 1, STAGES)
            mbarrier.arrive(free.index(done), pred=step > 0)
            if CLUSTER > 1:
                mbarrier.arrive(both_free.index(done), pred=step > 0)
        if GROUPS == 2:
            mbarrier.arrive(turn.index(1 - group))
        acc = warpgroup_mma_wait(0, deps=[acc])
        done, _ = stage_of(at + steps - 1, STAGES)
        mbarrier.arrive(free.index(done))
        if CLUSTER > 1:
            mbarrier.arrive(both_free.index(done))

        m0 = tile_m * BLOCK_M
        for part in gl.static_range(SUBTILE):
            n0 = tile_n * BLOCK_N + part * PART
            x = gl.convert_layout(columns(acc, part, SUBTILE), part_layout, assert_trivial=True)
            store_part(
                x, c_desc, pre_desc, bias, c_space, m0, n0, N, part_layout, PART, ACT, BIAS, PRE,
            )  # fmt: skip
    tma.store_wait(0)


# How tiles are shared out changes with every shape: not a reason to compile anew.
@gluon.jit(do_not_specialize=["residents", "kept"])
def hopper_kernel(
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
    """C = act(A . B + bias); `pre` takes A . B + bias.  Started with four warps there are two groups."""
    gl.static_assert(STAGES > 1, "a product in flight keeps its stage until the next one has begun")
    CLUSTER: gl.constexpr = gl.num_ctas()
    GROUPS: gl.constexpr = 8 // gl.num_warps()
    BIAS: gl.constexpr = bias is not None
    PRE: gl.constexpr = pre is not None
    dtype: gl.constexpr = A.dtype.element_ty
    out: gl.constexpr = C.dtype.element_ty
    a_shape: gl.constexpr = [BLOCK_M, BLOCK_K] if A_ROW_MAJOR else [BLOCK_K, BLOCK_M]
    b_shape: gl.constexpr = [BLOCK_K, BLOCK_N] if B_ROW_MAJOR else [BLOCK_N, BLOCK_K]
    c_shape: gl.constexpr = [BLOCK_M, BLOCK_N // SUBTILE]
    in_m: gl.constexpr = [[1, 0]] if CLUSTER > 1 else []
    a_cga: gl.constexpr = in_m if A_ROW_MAJOR or CLUSTER == 1 else [[0, 1]]
    b_cga: gl.constexpr = [[0, 0]] if CLUSTER > 1 else []
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_shape, dtype, cga_layout=a_cga)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, dtype, cga_layout=b_cga)
    c_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(c_shape, out, cga_layout=in_m)
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
    c_space = gl.allocate_shared_memory(out, [GROUPS] + c_shape, c_layout)
    ready = mbarrier.allocate_mbarrier(STAGES)
    free = mbarrier.allocate_mbarrier(STAGES)
    turn = mbarrier.allocate_mbarrier(GROUPS)
    both_free = free
    if CLUSTER > 1:
        both_free = mbarrier.allocate_mbarrier(STAGES, two_ctas=True)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), 1)
        mbarrier.init(free.index(stage), 1)
        if CLUSTER > 1:
            mbarrier.init(both_free.index(stage), 1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turn.index(group), 1)
    if CLUSTER > 1:
        mbarrier.sync_cluster_init()

    first, stop, stride = share_of(gl.program_id(0), residents, kept)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    # fmt: off
    if GROUPS == 2:
        gl.warp_specialize([
            (multiply_tiles, (
                a_ring, b_ring, ready, free, both_free, turn, c_desc, pre_desc, vector, c_space.index(0), 0,
                first, stop, stride, tiles_m, tiles_n, steps, N, BLOCK_M, BLOCK_N, GROUP_M, A_ROW_MAJOR,
                B_ROW_MAJOR, ACT, SUBTILE, GROUPS, CLUSTER, BIAS, PRE,
            )),
            (multiply_tiles, (
                a_ring, b_ring, ready, free, both_free, turn, c_desc, pre_desc, vector, c_space.index(1), 1,
                first, stop, stride, tiles_m, tiles_n, steps, N, BLOCK_M, BLOCK_N, GROUP_M, A_ROW_MAJOR,
                B_ROW_MAJOR, ACT, SUBTILE, GROUPS, CLUSTER, BIAS, PRE,
            )),
            (load_tiles, (
                a_desc, b_desc, a_ring, b_ring, ready, free, both_free, first, stop, stride, tiles_m, tiles_n, steps,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_ROW_MAJOR, B_ROW_MAJOR, CLUSTER,
            )),
        ], [4, 1], [232, 40])
    else:
        gl.warp_specialize([
            (multiply_tiles, (
                a_ring, b_ring, ready, free, both_free, turn, c_desc, pre_desc, vector, c_space.index(0), 0,
                first, stop, stride, tiles_m, tiles_n, steps, N, BLOCK_M, BLOCK_N, GROUP_M, A_ROW_MAJOR,
                B_ROW_MAJOR, ACT, SUBTILE, GROUPS, CLUSTER, BIAS, PRE,
            )),
            (load_tiles, (
                a_desc, b_desc, a_ring, b_ring, ready, free, both_free, first, stop, stride, tiles_m, tiles_n, steps,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_ROW_MAJOR, B_ROW_MAJOR, CLUSTER,
            )),
        ], [1], [40])
    # fmt: on
