"""`ScaledGemm`: products of fp8 numbers with a scale a row, summed up in fp32; forward, dgrad and wgrad.

    C [M, N]  = (A  / sA)[M, K] . (B / sB)[K, N]  * sA[M, 1] * sB[1, N]       e4m3 . e4m3
    dA, dB    the same of dC, which is e5m2, and the other operand

A row of an operand is what is summed over: scales belong to rows of A and columns of B.  What came over the wire in fp8
(`Quantised`) is multiplied as it came.  Where its scales lie along the sum, they are multiplied into the other operand
before that is rounded:  sum_k a[m, k] (s[k] q[k, n])  =  sum_k (a[m, k] s[k]) q[k, n].

On devices `torch._scaled_mm` multiplies.  On CPUs the same numbers are widened: its own product there widens, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ndtp.compute.gemm import Letters, Multiply, TorchGemm, joined
from ndtp.compute.quantised import LARGEST, Quantised, scaled_rows, widened

OPERAND, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of the sizes of a weight and of what is summed over: torch._scaled_mm takes no others on a device
ScaledRows = tuple[Tensor, Tensor | None]  # numbers of fp8, and the scale of each row; None: 1


class HasProducts(Protocol):
    """The part of `ndtp.Wire` that says how products multiply."""

    @property
    def products(self) -> str | None: ...


class ScaledGemm(TorchGemm):
    """Products by fp8 with a scale a row.  Products of experts are those of torch.

    Args:
        formats: the dtypes of the two operands.
    """

    takes_codes = True

    def __init__(self, formats: tuple[torch.dtype, torch.dtype] = (OPERAND, OPERAND)) -> None:
        self.formats = formats

    def _bound(
        self, one: tuple[int, Letters], other: tuple[int, Letters], result: Letters, how: dict[str, Any],
        same_batch: bool = True,
    ) -> Multiply:  # fmt: skip
        # Of A[m, k], B[k, n] and dC[m, n] the gradient is what has no k.
        formats = [OPERAND if "k" in letters else GRADIENT for _, letters in (one, other)]
        if result[-2] not in one[1][-2:]:
            formats.reverse()
        by = ScaledGemm((formats[0], formats[1]))
        return TorchGemm._bound(by, one, other, result, how, same_batch)

    def takes_blocks(self, dtype: torch.dtype) -> bool:
        return True

    def sums_parts(self, dtype: torch.dtype) -> bool:
        return False  # a rank's own part would be rounded otherwise than the others

    def bound_product(self, transpose_a: bool, transpose_b: bool, dims: int | None) -> Multiply:
        def multiply(a: Tensor, b: Tensor) -> Tensor:
            if a.dim() > 2 and b.dim() == 2 and not transpose_a:
                return self.product(a.flatten(0, -2), b, False, transpose_b).unflatten(0, a.shape[:-1])
            return self.product(a, b, transpose_a, transpose_b)

        return multiply

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
        """See `TorchGemm.product_of_blocks`: one product for each block of what is summed over, in fp32."""
        assert parts is None and not accumulate, "no part of a sum is multiplied by itself, see `sums_parts`"
        total = self._sum(a, b, transpose_a, transpose_b).to(a.dtype)
        if blocks > 1:
            total = total.unflatten(1, (blocks, -1)).movedim(1, 0)
        return total.contiguous() if out is None else out.copy_(total)

    def _sum(self, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
        """A . B, whose blocks of columns are either summed over one by one, or lie side by side in the result."""
        if b.dim() == 3 and not transpose_b:
            parts = _blocks(b)
            return torch.cat([self._sum(a, part, transpose_a, False) for part in parts], 1)
        if a.dim() == 3 and transpose_a:
            return torch.cat([self._sum(part, b, True, transpose_b) for part in _blocks(a)], 0)
        ones, others = _blocks(a), _blocks(b)
        if len(ones) > 1 < len(others) != len(ones):
            ones = [joined(a)]
        if len(ones) != len(others):  # the one that is whole is cut like the other
            ones = list(ones[0].chunk(len(others), 0 if transpose_a else 1)) if len(ones) == 1 else ones
            others = list(others[0].chunk(len(ones), 1 if transpose_b else 0)) if len(others) == 1 else others
        found = [
            self.product(one, other, transpose_a, transpose_b, wide=len(ones) > 1)
            for one, other in zip(ones, others, strict=True)
        ]
        for part in found[1:]:
            found[0] += part
        return found[0]

    def product(self, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, wide: bool = False) -> Tensor:
        """A . B of two matrices, each of which may be stored swapped; in fp32 if it is `wide`, else in A's dtype."""
        dtype = torch.promote_types(a.dtype, torch.float32) if wide else a.dtype
        along_a = a.scales.mT if isinstance(a, Quantised) and transpose_a else None
        along_b = b.scales.mT if isinstance(b, Quantised) and not transpose_b else None
        if along_a is not None and along_b is not None:  # one of them is rounded anew: the gradient
            if self.formats[0] == GRADIENT:
                a, along_a = a.wide(), None  # type: ignore[attr-defined]
            else:
                b, along_b = b.wide(), None  # type: ignore[attr-defined]
        one = _rows(a, transpose_a, self.formats[0], along_b)
        other = _rows(b, not transpose_b, self.formats[1], along_a)
        return multiply(one, other, dtype)


def _blocks(x: Tensor) -> list[Tensor]:
    """Return an operand as the blocks of columns as which it came in fp8; else as one matrix, to be rounded here."""
    if x.dim() == 2:
        return [x]
    if not isinstance(x, Quantised):
        return [joined(x)]
    return [Quantised(part, scale, x.dtype) for part, scale in zip(x.payload, x.scales, strict=True)]


def _rows(x: Tensor, is_swapped: bool, dtype: torch.dtype, fold: Tensor | None) -> ScaledRows:
    """Return an operand with what is summed over as its last dim, in fp8, and the scale of each row.

    Args:
        is_swapped: whether it is stored the other way round.
        fold: [1, columns], which is multiplied in before it is rounded.
    """
    if isinstance(x, Quantised) and fold is None:
        return (x.payload.mT, None) if is_swapped else (x.payload, x.scales)
    plain = x.wide() if isinstance(x, Quantised) else x
    plain = plain.mT if is_swapped else plain
    if fold is not None:
        plain = plain * fold
    if not plain.numel():
        return plain.to(dtype), plain.new_ones((*plain.shape[:-1], 1), dtype=torch.float32)
    numbers, scale = scaled_rows(plain, LARGEST[dtype])
    return numbers.to(dtype), scale


def multiply(one: ScaledRows, other: ScaledRows, dtype: torch.dtype) -> Tensor:
    """Return [M, N] of [M, K] and [N, K] with a scale for each of their rows."""
    (a, scale), (b, other_scale) = one, other
    if a.is_cuda and a.dim() == 2 and not (a.shape[1] % MULTIPLE or b.shape[0] % MULTIPLE) and a.numel():
        return by_kernel(one, other, torch.bfloat16).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    result = widened(a).to(wide) @ widened(b).to(wide).mT
    for factor in (scale, None if other_scale is None else other_scale.mT):
        if factor is not None:
            result *= factor
    return result.to(dtype)


def by_kernel(one: ScaledRows, other: ScaledRows, dtype: torch.dtype) -> Tensor:
    """`multiply` by `torch._scaled_mm`: rows of A as they lie, and rows of B as columns of a matrix by columns."""
    (a, scale), (b, other_scale) = one, other
    ones = lambda x: torch.ones(x.shape[0], 1, device=x.device)  # noqa: E731
    scales = ones(a) if scale is None else scale, ones(b) if other_scale is None else other_scale
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().mT, scale_a=scales[0].contiguous(), scale_b=scales[1].contiguous().mT,
        out_dtype=dtype,
    )  # fmt: skip


def gemm_of(wire: HasProducts | None, gemm: TorchGemm) -> TorchGemm:
    """Return what multiplies where a wire says so, else `gemm`."""
    return ScaledGemm() if wire is not None and wire.products == "fp8" else gemm
