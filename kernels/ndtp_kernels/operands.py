"""Operands in memory: strides, batch dims, blocks. Shapes and strides only, so meta tensors work, too.

An operand is `[batch.., rows, cols]`, or, in p blocks along one of its letters, `[p, batch.., rows, cols]` with the
rows or cols of one block: what an all-gather leaves and what a reduce-scatter wants.  Letters are the product's: A has
m and k, B has k and n, C has m and n, whatever the transposes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ndtp_kernels.errors import KernelError


@dataclass(frozen=True)
class Matrix:
    """One operand as the kernels address it.  Strides in elements; 0 broadcasts a batch dim."""

    rows: int
    cols: int
    stride_row: int
    stride_col: int
    batch: tuple[int, ...] = ()
    batch_strides: tuple[int, ...] = ()
    blocked: int = 0  # 1: in blocks along rows, 2: along cols
    block: int = 1  # rows or cols of one block
    block_stride: int = 16  # unused when not blocked, but a descriptor wants a multiple of 16 bytes

    @property
    def row_major(self) -> bool:
        return self.stride_col == 1 or self.cols == 1

    def broadcast(self, batch: tuple[int, ...]) -> Matrix:
        """Return the operand over all of `batch`: missing and size-1 dims get stride 0."""
        if not batch:
            return self
        missing = len(batch) - len(self.batch)
        sizes, strides = (1,) * missing + self.batch, (0,) * missing + self.batch_strides
        strides = tuple(0 if own == 1 else stride for own, stride in zip(sizes, strides, strict=True))
        return replace(self, batch=batch, batch_strides=strides)

    def keep(self, dims: Sequence[int]) -> Matrix:
        return replace(
            self, batch=tuple(self.batch[d] for d in dims), batch_strides=tuple(self.batch_strides[d] for d in dims)
        )

    @property
    def outer_inner(self) -> tuple[int, int]:
        """Strides of the two batch dims that the kernels know."""
        outer, inner = (0, 0, *self.batch_strides)[-2:]
        return outer, inner


def matrix(tensor: Tensor, letters: str, transpose: bool, blocks: str | None, *, op: str, name: str) -> Matrix:
    """Read the layout of `tensor`, whose dims (after `transpose`) are the two `letters`.

    Raises:
        KernelError: too few dims, or blocks along a letter that the operand does not have.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    try:
        return _read_cached(shape, stride, letters, transpose, blocks, op, name)
    except TypeError:  # symbolic sizes, while something is traced, have no hash
        return _read(shape, stride, letters, transpose, blocks, op, name)


def _read(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    letters: str,
    transpose: bool,
    blocks: str | None,
    op: str,
    name: str,
) -> Matrix:
    if blocks is not None and (len(blocks) != 1 or blocks not in letters):
        raise KernelError(
            op, f"{name} has dims {letters[0]} and {letters[1]}, not {blocks!r}", f"{name}_blocks in {tuple(letters)}"
        )
    wanted = 2 + (blocks is not None)
    if len(shape) < wanted:
        form = f"[{'blocks, ' if blocks else ''}.., {letters[0]}, {letters[1]}]"
        raise KernelError(op, f"{name} has shape {shape}", f"pass {name} as {form}")
    lead = 1 if blocks is not None else 0
    batch, batch_strides = shape[lead:-2], stride[lead:-2]
    (rows, cols), (stride_row, stride_col) = shape[-2:], stride[-2:]
    if transpose:
        rows, cols, stride_row, stride_col = cols, rows, stride_col, stride_row
    plain = Matrix(rows, cols, stride_row, stride_col, batch, batch_strides)
    if blocks is None:
        return plain
    num_blocks, block_stride = shape[0], stride[0]
    if num_blocks == 0:
        raise KernelError(op, f"{name} has shape {shape}: no block at all", "pass at least one block")
    along_rows = blocks == letters[0]
    block, step = (rows, stride_row) if along_rows else (cols, stride_col)
    if along_rows:
        plain = replace(plain, rows=rows * num_blocks)
    else:
        plain = replace(plain, cols=cols * num_blocks)
    # One block, or blocks that follow one another without a gap: an ordinary matrix.
    if num_blocks == 1 or block_stride == block * step or block == 0:
        return plain
    return replace(plain, blocked=1 if along_rows else 2, block=block, block_stride=block_stride)


# A model multiplies the same few shapes again and again.
_read_cached = functools.lru_cache(maxsize=4096)(_read)


def batch_shape(op: str, **operands: Matrix) -> tuple[int, ...]:
    if not any(o.batch for o in operands.values()):
        return ()
    try:
        return tuple(torch.broadcast_shapes(*(o.batch for o in operands.values())))
    except RuntimeError:
        shapes = ", ".join(f"{name} {o.batch}" for name, o in operands.items())
        raise KernelError(op, f"batch dims do not broadcast: {shapes}", "equal sizes, or 1") from None


def merge_batch(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Merge batch dims, of equal sizes in all of `matrices`, wherever one stride serves two neighbours in each."""
    if not matrices[0].batch:
        return list(matrices)
    sizes = matrices[0].batch
    result = [m.keep([d for d, size in enumerate(sizes) if size != 1]) for m in matrices]
    dim = len(result[0].batch) - 2
    while dim >= 0:
        inner = result[0].batch[dim + 1]
        if all(m.batch_strides[dim] == inner * m.batch_strides[dim + 1] for m in result):
            result = [
                replace(
                    m,
                    batch=(*m.batch[:dim], m.batch[dim] * inner, *m.batch[dim + 2 :]),
                    batch_strides=m.batch_strides[:dim] + m.batch_strides[dim + 1 :],
                )
                for m in result
            ]
        dim -= 1
    return result


def fold_batch_into_rows(a: Matrix, b: Matrix, c: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Fold [batch, M] rows of A into M' = batch * M rows of one product, where B has no batch dim."""
    if len(a.batch) != 1 or b.batch_strides != (0,) or a.rows == 0:
        return a, b, c
    if any(m.blocked == 1 or m.batch_strides[0] != m.rows * m.stride_row for m in (a, c)):
        return a, b, c

    def fold(m: Matrix) -> Matrix:
        return replace(m, rows=m.rows * m.batch[0], batch=(), batch_strides=())

    return fold(a), b.keep([]), fold(c)


def shape_of(batch: tuple[int, ...], rows: int, cols: int, blocks: int, *, op: str) -> list[int]:
    """The shape of a C [rows, cols] that is written as so many blocks of columns, or whole where it is 1."""
    if blocks == 1:
        return [*batch, rows, cols]
    if blocks < 1 or cols % blocks:
        what = f"C is ({rows}, {cols}); {blocks} blocks of columns do not divide {cols}"
        raise KernelError(op, what, f"c_blocks that divides {cols}")
    return [blocks, *batch, rows, cols // blocks]
