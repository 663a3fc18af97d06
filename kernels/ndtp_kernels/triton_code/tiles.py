"""Tiles of the GEMM kernel: their order, tensor descriptors (TMA) of operands in blocks, and groups of columns."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M rows, column by column: neighbours in time share operands in L2."""
    width = GROUP_M * tiles_n
    first_m = tile // width * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % width % rows, tile % width // rows


@triton.jit
def share_of(program, residents, kept):
    """The tiles of a program, as `launch.share_out` has it: the first, where they stop, from one to the next."""
    first = program
    stop = kept
    if program >= residents:
        first += kept - residents
        stop = first + 1
    return first, stop, max(residents, 1)


@triton.jit
def describe(
    pointer,
    batch,
    rows,
    cols,
    stride_batch,
    stride_row,
    stride_col,
    block,
    stride_block,
    RANK: tl.constexpr,
    BLOCKED: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A tensor descriptor of a matrix: [rows, cols], or [batch, blocks, rows, cols]; column-major ones are turned."""
    if RANK == 2:
        if ROW_MAJOR:
            return tl.make_tensor_descriptor(pointer, [rows, cols], [stride_row, 1], [BLOCK_R, BLOCK_C])
        else:
            return tl.make_tensor_descriptor(pointer, [cols, rows], [stride_col, 1], [BLOCK_C, BLOCK_R])
    else:
        num_blocks = 1
        if BLOCKED == 1:
            num_blocks = rows // block
            rows = block
        if BLOCKED == 2:
            num_blocks = cols // block
            cols = block
        if ROW_MAJOR:
            return tl.make_tensor_descriptor(
                pointer,
                [batch, num_blocks, rows, cols],
                [stride_batch, stride_block, stride_row, 1],
                [1, 1, BLOCK_R, BLOCK_C],
            )
        else:
            return tl.make_tensor_descriptor(
                pointer,
                [batch, num_blocks, cols, rows],
                [stride_batch, stride_block, stride_col, 1],
                [1, 1, BLOCK_C, BLOCK_R],
            )


@triton.jit
def locate(row, col, block, BLOCKED: tl.constexpr):
    """The block that holds (row, col), and where in it."""
    if BLOCKED == 1:
        return row // block, row % block, col
    elif BLOCKED == 2:
        return col // block, row, col % block
    else:
        return 0, row, col


@triton.jit
def load_tile(
    descriptor,
    batch,
    row,
    col,
    block,
    RANK: tl.constexpr,
    BLOCKED: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The [BLOCK_R, BLOCK_C] tile at (row, col), through a descriptor made by `describe`."""
    if RANK == 2:
        if ROW_MAJOR:
            return descriptor.load([row, col])
        else:
            return descriptor.load([col, row]).T
    else:
        which, r, c = locate(row, col, block, BLOCKED)
        if ROW_MAJOR:
            return descriptor.load([batch, which, r, c]).reshape(BLOCK_R, BLOCK_C)
        else:
            return descriptor.load([batch, which, c, r]).reshape(BLOCK_C, BLOCK_R).T


@triton.jit
def store_tile(descriptor, value, batch, row, col, block, RANK: tl.constexpr, BLOCKED: tl.constexpr):
    if RANK == 2:
        descriptor.store([row, col], value)
    else:
        which, r, c = locate(row, col, block, BLOCKED)
        descriptor.store([batch, which, r, c], value.reshape(1, 1, value.shape[0], value.shape[1]))


@triton.jit
def columns(acc, part: tl.constexpr, PARTS: tl.constexpr):
    """Return one of PARTS (1, 2 or 4) equal groups of columns of `acc`, without leaving registers."""
    if PARTS == 1:
        return acc
    else:
        half: tl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(acc.shape[0], 2, half).permute(0, 2, 1).split()
        if part < PARTS // 2:
            wanted = left
        else:
            wanted = right
        if PARTS == 2:
            return wanted
        else:
            left, right = wanted.reshape(acc.shape[0], 2, half // 2).permute(0, 2, 1).split()
            if part % 2 == 0:
                return left
            else:
                return right
