"""Sizes that do not divide, and leading dims: what a module does to its input before its products, and undoes after.

Features are padded in the parameters, rows in the activations.  Padding is zero wherever a product reads it, so that
results and gradients are those of the unpadded problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.errors import LayoutError
from ndtp.runtime.process_grid import ProcessGrid


@dataclass(frozen=True)
class RowBlocks:
    """The rows of the whole tensor come in blocks of `padded`, of which the first `real` are no padding.

    Attributes:
        across: if more than 1, the real rows of a block are a matrix of so many columns, of which the dense tensor has
            the columns one behind the other.
    """

    real: int = 1
    padded: int = 1
    across: int = 0

    def dense_row(self, row: Tensor) -> Tensor:
        """Return the index, in the dense tensor, of each of these rows; of padding any."""
        block, row = row // self.padded, row % self.padded
        if self.across > 1:
            row = row % self.across * (self.real // self.across) + row // self.across
        return block * self.real + row

    @classmethod
    def of(cls, rows: int, padded_rows: Tensor) -> RowBlocks:
        """Return the blocks of a rank that brings in `rows`, padded by `pad_rows`; no rows are one empty block."""
        return cls(rows or 1, padded_rows.shape[0] or 1)


# --------------------------------------------------------------------------------------------------------------- sizes


def padded_to(size: int, multiple: int) -> int:
    """The next multiple of a size, which is itself where it is one."""
    return size + -size % multiple


def feature_multiple(letter: str, plan: MatMulPlan, pad: bool | int) -> int:
    """Return the multiple that features are padded to: an integer `pad`, or with `pad=True` what every split
    divides.
    """
    return plan.granularity(letter) if pad is True else int(pad) or 1


def pair_multiples(up: MatMulPlan, down: MatMulPlan, pad: bool | int) -> tuple[int, int, int]:
    """The multiples of the features that enter a pair of products, of those between, and of those that leave it."""
    inside = math.lcm(feature_multiple("n", up, pad), feature_multiple("k", down, pad))
    return feature_multiple("k", up, pad), inside, feature_multiple("n", down, pad)


def row_multiple(plans: Sequence[MatMulPlan], outside: Layout) -> int:
    """Return the multiple of a rank's rows outside that every split of the rows inside divides."""
    splits = [layout.num_splits(0) for plan in plans for layout in (plan.a, plan.out)]
    held = [plan.grid.size(plan.orders["m"]) for plan in plans]
    return math.lcm(outside.num_splits(0), *splits, *held) // outside.num_splits(0)


def padded_tokens(tokens: int, multiple: int, outside: Layout) -> int:
    """All rows, where `pad_rows` pads those of each rank outside to a multiple."""
    return padded_to(tokens, multiple * outside.num_splits(0))


# ---------------------------------------------------------------------------------------------------------------- rows


def as_rows(x: Tensor, name: str) -> Tensor:
    """Reshape [.., features] to [rows, features]."""
    if x.dim() < 2:
        raise LayoutError(
            f"Linear '{name}': x has shape {tuple(x.shape)}; it takes [tokens, features], whose rows a grid splits"
            "\n  fix: x.unsqueeze(0), if one row divides"
        )
    return x.flatten(0, -2)


def pad_rows(rows: Tensor, multiple: int, features: int = 0) -> Tensor:
    """Pad [rows, ..] with zeros to the next multiple of rows, and to `features` more features."""
    padding = -rows.shape[0] % multiple
    return F.pad(rows, (0, features, 0, padding)) if padding or features else rows


def with_leading_dims(y: Tensor, lead: Sequence[int], name: str) -> Tensor:
    """Reshape [rows, features] to [.., features], with the leading dims of the input.

    Where the rows are not split as those of the input were, the first of these dims has another part of its whole.

    Raises:
        LayoutError: rows that do not make whole blocks of the other leading dims.
    """
    if len(lead) == 1:
        return y
    if y.shape[0] == math.prod(lead):
        return y.reshape(*lead, y.shape[1])
    block = max(math.prod(lead[1:]), 1)
    if y.shape[0] % block:
        raise LayoutError(
            f"{name}: {y.shape[0]} rows of the result do not make whole blocks of {tuple(lead[1:])}, the leading dims "
            f"of a shard of {tuple(lead)} rows\n  fix: flatten the leading dims first"
        )
    return y.unflatten(0, (y.shape[0] // block, *lead[1:]))


# ------------------------------------------------------------------------------------------------------------- zeroing


def zero_padding(x: Tensor, layout: Layout, mesh: ProcessGrid, features: int) -> Tensor:
    """Set the columns of this rank's shard [.., features] that lie beyond the real features to zero."""
    width = x.shape[-1]
    start = mesh.grid.index(mesh.rank, layout.dims[-1]) * width
    real = min(max(features - start, 0), width)
    if torch.compiler.is_compiling():
        # One graph on every rank: a compiler may put collectives in another order for another graph.
        return torch.where(torch.arange(width, device=x.device) < real, x, 0)
    return x if real == width else F.pad(x[..., :real], (0, width - real))


def zero_padding_rows(x: Tensor, layout: Layout, mesh: ProcessGrid, blocks: RowBlocks) -> Tensor:
    """Set the rows of this rank's shard [rows, features] that are padding to zero, and those of its gradient.

    An operation may give anything there, NaN too, which the zeros of the other factor do not remove from a product.
    """
    if blocks.real == blocks.padded:
        return x
    start = mesh.grid.index(mesh.rank, layout.dims[0]) * x.shape[0]
    row = torch.arange(x.shape[0], device=x.device) + start
    return x.masked_fill((row % blocks.padded >= blocks.real)[:, None], 0)
