"""The local products of one rank, forward, dgrad and wgrad alike, with fp32 accumulation.

One small interface, two implementations: torch's GEMM, and the kernels of `ndtp_kernels`.

A matrix [rows, columns] of a product without batch dims may also lie as p blocks of columns, [p, rows, columns / p]:
what an all-gather along the last dim leaves, and a reduce-scatter along it wants.  It is read and written as it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product as combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp import dtypes
from ndtp.compute.epilogues import ACTIVATIONS, KernelEpilogues, TorchEpilogues
from ndtp.compute.grouped import KernelGrouped, TorchGrouped

LOW_PRECISION = tuple(getattr(torch, name) for name in dtypes.LOW_PRECISION)
Letters = tuple[str | None, ...]
Shape = tuple[int, ...]
Multiply = Callable[..., Tensor]


class TorchGemm(TorchEpilogues, TorchGrouped):
    """Products by torch; what follows them by `ndtp.compute.epilogues`, those of experts by `ndtp.compute.grouped`.

    Attributes:
        own_part_from: see `ndtp.compute.devices.DeviceKind`, whose it is by default.
        takes_processors: whether those of a CPU multiply, on which other ranks may have to wait.
        gradients_in_blocks: whether the gradient of a weight that is scattered along its columns is written as blocks
            of them.  A product a block reads dC again for each, which takes a fifth longer than one and a copy.
        takes_codes: whether operands may be `ndtp.compute.quantised.Quantised`.
    """

    own_part_from: int | None = None
    takes_processors = True
    gradients_in_blocks = False
    takes_codes = False

    def bound(
        self,
        letters: tuple[Letters, Letters, Letters],
        one: Shape,
        other: Shape,
        *,
        blocks: int | None = None,
        parts: Sequence[int] | None = None,
        accumulate: bool = False,
    ) -> Multiply:
        """A product, for operands of these shapes: a function of the two.

        It is summed over the letter that its result lacks, and over batch dims that the result lacks or has with
        size 1.  The order in which letters are stored is free.

        Args:
            letters: of the dims of both operands and of the result; None is a dim of size 1.
            blocks: of columns, as which the result lies; the function takes `out` then, where to put it.  For products
                without batch dims, as are the others.
            parts: of the blocks of the contracted dim, those to sum; default: all.
            accumulate: add to `out`.
        """
        x, y, z = letters
        how = {} if blocks is None else {"blocks": blocks, "parts": parts, "accumulate": accumulate}
        if len(z) == 2 < len(x) == len(y) and x[-2] == y[-2] and one[:-1] == other[:-1]:
            flat = self._bound((2, x[-2:]), (2, y[-2:]), z, how)  # of the same rows: one GEMM, not a batch of them
            return lambda grad, a, **out: flat(grad.flatten(0, -2), a.flatten(0, -2), **out)
        same_batch = one[:-2] == other[:-2]
        return self._bound((len(one), x), (len(other), y), z, how, same_batch)

    def _bound(
        self,
        one: tuple[int, Letters],
        other: tuple[int, Letters],
        result: Letters,
        how: dict[str, Any],
        same_batch: bool = True,
    ) -> Multiply:
        """Multiply over the letter that the result lacks, whatever the order in which the three are stored."""
        row, column = result[-2:]
        is_swapped = row not in one[1][-2:]
        (a_dims, a), (b_dims, b) = (other, one) if is_swapped else (one, other)
        transposed = a[-2] != row, b[-1] != column
        if len(a) == len(b) == 2 and (how or a_dims == 3 or b_dims == 3):
            how = {"transpose_a": transposed[0], "transpose_b": transposed[1], **how}
            product: Multiply = partial(self.product_of_blocks, **how)
        else:
            product = self.bound_product(*transposed, a_dims if same_batch and a_dims == b_dims else None)
            extra = max(a_dims, b_dims) - len(result)
            units = tuple(dim for dim, letter in enumerate(result) if letter is None)
            if extra > 0 or units:
                product = _summed(product, extra, units)
        if not is_swapped:
            return product
        return (lambda one, other, **out: product(other, one, **out)) if how else lambda one, other: product(other, one)

    def bound_finish(
        self, letters: tuple[Letters, Letters, Letters], one: Shape, other: Shape, name: str, dtype: torch.dtype
    ) -> Callable[..., tuple[Tensor | None, Tensor]] | None:
        """A product with what follows it, `act(A . B + bias)`, where these are one pass; None where they are not.

        Returns:
            A function of both operands, bias or None, and whether to keep what the activation takes: (that, activated).
        """
        return None

    def bound_finish_backward(
        self, letters: tuple[Letters, Letters, Letters], one: Shape, other: Shape, name: str, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """A product with the gradient of the activation that follows it in backward, where these are one pass.

        Returns:
            A function of both operands and of what the activation took in forward.
        """
        return None

    def takes_blocks(self, dtype: torch.dtype) -> bool:
        """Return whether operands in blocks of columns are multiplied as they lie, or are joined first."""
        return self.sums_parts(dtype)

    def sums_parts(self, dtype: torch.dtype) -> bool:
        """Return whether parts of a sum over the contracted dim may be multiplied one by one, without loss of
        precision.
        """
        return dtype not in LOW_PRECISION

    def bound_product(self, transpose_a: bool, transpose_b: bool, dims: int | None) -> Multiply:
        """A . B, whose two last dims may each be stored swapped; both have `dims` dims and one batch, or None."""
        multiply = {2: torch.mm, 3: torch.bmm}.get(dims or 0, torch.matmul)
        if transpose_a:
            return (lambda a, b: multiply(a.mT, b.mT)) if transpose_b else (lambda a, b: multiply(a.mT, b))
        if transpose_b and dims == 2:
            return F.linear  # which swaps b on its own
        return (lambda a, b: multiply(a, b.mT)) if transpose_b else multiply

    def product_of_blocks(
        self,
        a: Tensor,
        b: Tensor,
        transpose_a: bool,
        transpose_b: bool,
        *,
        out: Tensor | None = None,
        blocks: int = 1,
        parts: Sequence[int] | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """A . B of matrices that lie whole or as blocks of columns, [p, rows, columns / p]: a product per block."""
        a_letters, b_letters = "km" if transpose_a else "mk", "nk" if transpose_b else "kn"
        if a.dim() == 3 and (a_letters[1] != "k" or not self.sums_parts(a.dtype)):
            a = joined(a)
        if b.dim() == 3 and b_letters[1] == "k" and (a.dim() == 3 or not self.sums_parts(b.dtype)):
            b = joined(b)
        if b.dim() == 3 and b_letters[1] == "n" and blocks not in (1, b.shape[0]):
            b = joined(b)
        cuts = {"m": 1, "k": 1, "n": blocks}
        for operand, letters in ((a, a_letters), (b, b_letters)):
            if operand.dim() == 3:
                cuts[letters[1]] = operand.shape[0]
        if out is None:
            rows, columns = _size(a, a_letters, "m"), _size(b, b_letters, "n") // blocks
            out = a.new_empty((blocks, rows, columns) if blocks > 1 else (rows, columns))
        for n, k in combinations(range(cuts["n"]), range(cuts["k"]) if parts is None else parts):
            at = {"m": 0, "n": n, "k": k}
            left, right = _part(a, a_letters, cuts, at), _part(b, b_letters, cuts, at)
            left, right = left.mT if transpose_a else left, right.mT if transpose_b else right
            place = _part(out, "mn", cuts, at)
            if accumulate or (k != parts[0] if parts is not None else k > 0):
                place.addmm_(left, right)
            else:
                torch.mm(left, right, out=place)
        return out


class KernelGemm(KernelEpilogues, KernelGrouped, TorchGemm):
    """Products by `ndtp_kernels.gemm`: Triton on a GPU, torch where a kernel cannot run.

    Args:
        options: `ndtp_kernels.Options`, such as the backend, or the number of SMs to leave to collectives.
    """

    gradients_in_blocks = True  # in one pass

    def __init__(self, **options: Any) -> None:
        import ndtp_kernels

        self.gemm, self.options = ndtp_kernels.gemm, ndtp_kernels.Options(**options)

    def sums_parts(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float64  # one pass over all blocks is faster, and rounds once

    def _fused(
        self, letters: tuple[Letters, Letters, Letters], one: Shape, other: Shape, name: str, dtype: torch.dtype
    ) -> dict[str, Any] | None:
        """The arguments by which two matrices are multiplied with an activation; None where no kernel does that."""
        x, y, z = letters
        if not len(x) == len(y) == len(z) == len(one) == len(other) == 2:
            return None
        if not self.fuses(name, dtype) or ACTIVATIONS[name].width != 1 or z[0] not in x:
            return None
        return {
            "transpose_a": x[0] != z[0], "transpose_b": y[1] != z[1], "activation": ACTIVATIONS[name].kernel,
            "options": self.options,
        }  # fmt: skip

    def bound_finish(
        self, letters: tuple[Letters, Letters, Letters], one: Shape, other: Shape, name: str, dtype: torch.dtype
    ) -> Callable[..., tuple[Tensor | None, Tensor]] | None:
        how = self._fused(letters, one, other, name, dtype)
        if how is None:
            return None

        def run(a: Tensor, b: Tensor, bias: Tensor | None, keep: bool) -> tuple[Tensor | None, Tensor]:
            done = self.gemm(a, b, bias, return_preactivation=keep, **how)
            return (done.pre, done.c) if keep else (None, done)

        return run

    def bound_finish_backward(
        self, letters: tuple[Letters, Letters, Letters], one: Shape, other: Shape, name: str, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        import ndtp_kernels

        how = self._fused(letters, one, other, name, dtype)
        return None if how is None else partial(ndtp_kernels.backward_gemm, **how)

    def takes_blocks(self, dtype: torch.dtype) -> bool:
        return True

    def bound_product(self, transpose_a: bool, transpose_b: bool, dims: int | None) -> Multiply:
        return partial(self.product, transpose_a=transpose_a, transpose_b=transpose_b)

    def product(self, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
        if a.dtype is torch.float64 or a.is_complex():  # the kernels have no such form
            return super().bound_product(transpose_a, transpose_b, None)(a, b)
        return self.gemm(a, b, transpose_a=transpose_a, transpose_b=transpose_b, options=self.options)

    def product_of_blocks(
        self,
        a: Tensor,
        b: Tensor,
        transpose_a: bool,
        transpose_b: bool,
        *,
        out: Tensor | None = None,
        blocks: int = 1,
        parts: Sequence[int] | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        if a.dtype is torch.float64 or a.is_complex():
            return super().product_of_blocks(
                a, b, transpose_a, transpose_b, out=out, blocks=blocks, parts=parts, accumulate=accumulate
            )
        assert parts is None, "the kernels sum all parts in one pass, see `sums_parts`"
        return self.gemm(
            a,
            b,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            a_blocks=("m" if transpose_a else "k") if a.dim() == 3 else None,
            b_blocks=("k" if transpose_b else "n") if b.dim() == 3 else None,
            c_blocks=blocks,
            out=out,
            accumulate=accumulate,
            options=self.options,
        )


class ConjugateGemm:
    """The products of a backward of complex numbers: the gradient is multiplied by the conjugate of A or of B.

    All else is as `gemm` does it.
    """

    def __init__(self, gemm: TorchGemm) -> None:
        self.gemm = gemm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gemm, name)

    def bound(self, *args: Any, **kwargs: Any) -> Multiply:
        product = self.gemm.bound(*args, **kwargs)
        return lambda grad, operand, **out: product(grad, operand.conj(), **out)


def joined(matrix: Tensor) -> Tensor:
    """Blocks of columns [p, rows, columns / p] -> [rows, columns], a copy; a matrix as it is."""
    return matrix if matrix.dim() == 2 else matrix.movedim(0, 1).flatten(1)


def _size(matrix: Tensor, letters: str, letter: str) -> int:
    """The size of a letter, in a matrix or in blocks of its columns."""
    place = letters.index(letter)
    return matrix.shape[place - 2] * (matrix.shape[0] if matrix.dim() == 3 and place == 1 else 1)


def _part(matrix: Tensor, letters: str, cuts: dict[str, int], at: dict[str, int]) -> Tensor:
    """Return a view of one of the parts into which the letters are cut."""
    rows, columns = letters[0], letters[1]
    if matrix.dim() == 3:
        matrix = matrix[at[columns]]
    elif cuts[columns] > 1:
        matrix = _slice(matrix, 1, cuts[columns], at[columns])
    return _slice(matrix, 0, cuts[rows], at[rows]) if cuts[rows] > 1 else matrix


def _slice(matrix: Tensor, dim: int, count: int, at: int) -> Tensor:
    size = matrix.shape[dim] // count
    return matrix.narrow(dim, at * size, size)


def _summed(product: Multiply, extra: int, units: tuple[int, ...]) -> Multiply:
    """A product, summed over the batch dims that its operand lacks or holds with size 1."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        c = product(a, b)
        if extra > 0:
            c = c.sum(tuple(range(extra)))
        return c.sum(units, keepdim=True) if units else c

    return run
