"""Products part by part, beside the copies that bring their rows or take them away; see `triton_code.parts`.

Never measured, and in no product's way: `bench/symmetric.py` and the tests run them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndtp_kernels.errors import KernelError
from ndtp_kernels.launch import interpreted

TILE = (128, 128, 64)
SIGNALS = 1  # multiprocessors that a product leaves, at least: what raises its flags needs one


def gemm_of_arrivals(
    a: Tensor,
    b: Tensor,
    flags: Tensor,
    rank: int,
    *,
    out: Tensor | None = None,
    programs: int | None = None,
    tile: tuple[int, int, int] = TILE,
) -> Tensor:
    """C = A . B while the rows of A are on their way.

    Args:
        a: [ranks * rows, K]; rows of rank j are read when `flags[j]` is up.
        b: [K, N], of any strides.
        flags: int32 [ranks], 0 or 1.
        rank: whose rows come first, before those of rank + 1, rank + 2 and so on.
        programs: at most so many; default: all multiprocessors but `SIGNALS`.

    Returns:
        [ranks * rows, N]
    """
    return _launched(a, b, flags, rank, out, programs, tile, arriving=True)


def gemm_of_departures(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
    rank: int,
    *,
    out: Tensor | None = None,
    programs: int | None = None,
    tile: tuple[int, int, int] = TILE,
) -> Tensor:
    """C = A . B, whose rows leave part by part: those of rank - 1 first, then rank - 2, and one's own last.

    Args:
        counts: int32 [ranks], zero; counts up by one with every tile: part j is there at `tiles_of_part`.
    """
    return _launched(a, b, counts, rank, out, programs, tile, arriving=False)


def tiles_of_part(a: Tensor, b: Tensor, ranks: int, tile: tuple[int, int, int] = TILE) -> int:
    return -(-(a.shape[0] // ranks) // tile[0]) * -(-b.shape[1] // tile[1])


def put_signal(signal: Tensor) -> None:
    """Raise an int32 on the current stream, when it is down."""
    from ndtp_kernels.triton_code.parts import put_signal_kernel

    put_signal_kernel[(1,)](signal, num_warps=1)


def take_signal(signal: Tensor) -> None:
    """Lower an int32 on the current stream, when it is up."""
    from ndtp_kernels.triton_code.parts import take_signal_kernel

    take_signal_kernel[(1,)](signal, num_warps=1)


def wait_for(count: Tensor, at_least: int) -> None:
    """Hold the current stream until an int32 has come to `at_least`.

    The kernel that counts it up must have been launched once before: CUDA loads a kernel at its first launch, and that
    may wait for all kernels that run, this one included.
    """
    from ndtp_kernels.triton_code.parts import wait_for_kernel

    wait_for_kernel[(1,)](count, at_least, num_warps=1)


def _launched(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
    rank: int,
    out: Tensor | None,
    programs: int | None,
    tile: tuple[int, int, int],
    arriving: bool,
) -> Tensor:
    op = "gemm_of_arrivals" if arriving else "gemm_of_departures"
    ranks = counts.numel()
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise KernelError(op, f"A is {tuple(a.shape)} {a.dtype}, B is {tuple(b.shape)} {b.dtype}", "A [m, k], B [k, n]")
    if a.shape[0] % ranks or not 0 <= rank < ranks or counts.dtype != torch.int32 or not counts.is_contiguous():
        raise KernelError(
            op, f"{a.shape[0]} rows in {ranks} parts ({counts.dtype}), of which rank {rank}'s", "whole parts, int32"
        )
    from ndtp_kernels.triton_code.parts import gemm_of_parts_kernel

    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n) if out is None else out
    most = tiles_of_part(a, b, ranks, tile) * ranks
    if programs is None:
        on_device = a.device.type == "cuda"
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count - SIGNALS if on_device else 1
    gemm_of_parts_kernel[(max(1, min(most, programs)),)](
        a, b, c, counts, rank, ranks, m // ranks, n, k, *a.stride(), *b.stride(), *c.stride(),
        BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=tile[2], ARRIVING=arriving,
        PRECISION="ieee", UPCAST=interpreted(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return c
