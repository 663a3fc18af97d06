"""The rival to beat among Triton kernels: a bare persistent GEMM on tensor descriptors, one fixed tile, no epilogue.

Of the class that Triton's own tutorial on persistent matrix products teaches; C[M, N] = A[M, K] . B[N, K]^T in half
precision, on chips with TMA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ndtp_kernels.launch import allocate_on

CONSTANTS = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8}
OPTIONS = {"num_warps": 8, "num_stages": 3}


@triton.jit
def persistent_kernel(
    a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    a_tiles = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_tiles = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_tiles = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        # Bands of GROUP_M tiles, walked column by column, so that neighbours in time share operands in L2.
        band = tile // (GROUP_M * tiles_n)
        height = min(GROUP_M, tiles_m - band * GROUP_M)
        within = tile - band * GROUP_M * tiles_n
        row = (band * GROUP_M + within % height) * BLOCK_M
        col = within // height * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            total = tl.dot(a_tiles.load([row, step * BLOCK_K]), b_tiles.load([col, step * BLOCK_K]).T, total)
        c_tiles.store([row, col], total.to(c.dtype.element_ty))


def persistent_product(a: torch.Tensor, b: torch.Tensor, num_sms: int) -> torch.Tensor:
    """A [M, K] . B [N, K]^T, both contiguous; needs a chip with TMA."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(m, CONSTANTS["BLOCK_M"]) * triton.cdiv(n, CONSTANTS["BLOCK_N"])
    if a.is_cuda:
        triton.set_allocator(allocate_on(a.device))
    options = OPTIONS if a.is_cuda else {}  # the interpreter has none
    persistent_kernel[(min(tiles, num_sms),)](a, b, c, m, n, k, **CONSTANTS, **options)
    return c
