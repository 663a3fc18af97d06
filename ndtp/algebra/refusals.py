"""The errors with which a product is refused: what is wrong, the operands, the nearest thing that works."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ndtp.algebra.grid import divisors
from ndtp.algebra.layout import Layout
from ndtp.algebra.steps import Dims, is_legal
from ndtp.algebra.stored import Stored
from ndtp.errors import LayoutError


def order(where: str, operands: str, tensor: Stored, letter: str, fixed: Layout) -> LayoutError:
    """Tensors that store the axes of one letter in different orders."""
    return LayoutError(
        f"{where}: {tensor.name} and the other tensors disagree on the order of the axes of "
        f"{tensor.shown(letter)}\n  {operands}\n  fix: {tensor.name} as {tensor.written(fixed)}"
    )


def contiguity(where: str, operands: str, tensor: Stored, need: Dims) -> LayoutError:
    """A gathered or scattered axis that is major to one that stays: its blocks would not be contiguous."""
    layout, dims = tensor.layout, []
    for axes, held in zip(layout.dims, need, strict=True):
        dims.append((*(axis for axis in held if axis in axes), *(axis for axis in axes if axis not in held)))
    dim = next(
        d for d, (s, t) in enumerate(zip(layout.dims, need, strict=True)) if not is_legal(layout.grid, (s,), (t,))
    )
    stays = [axis for axis in need[dim] if axis in layout.dims[dim]]
    return LayoutError(
        f"{where}: {tensor.name} stores dim {tensor.dim_text(dim)} over ({' '.join(layout.dims[dim])}), of which "
        f"({' '.join(stays)}) must stay split in the order ({' '.join(need[dim])}); axes that are gathered or "
        f"scattered must be the minor ones, so that blocks stay contiguous\n"
        f"  {operands}\n  fix: {tensor.name} as {tensor.written(layout.with_dims(*dims))}"
    )


def size(
    where: str,
    operands: str,
    tensor: Stored,
    shape: tuple[int, ...],
    letter: str | None,
    extent: int,
    axes: Mapping[str, int],
    padded: str,
) -> LayoutError:
    """A dim of `extent` that its axes do not divide; `padded`, a size, would be divided wherever it is split."""
    which = ", ".join(f"{axis} ({ranks})" for axis, ranks in axes.items())
    sizes_that_fit = divisors(extent)
    shortened = sizes_that_fit if len(sizes_that_fit) <= 8 else [*sizes_that_fit[:4], "...", *sizes_that_fit[-3:]]
    listed = ", ".join(map(str, shortened))
    axis_text = next(iter(axes)) if len(axes) == 1 else "the product of " + " ".join(axes)
    return LayoutError(
        f"{where}: dim {tensor.shown(letter)} of {tensor.name} ({extent}) is split over axis "
        f"{which}, and {prod(axes.values())} does not divide {extent}.\n"
        f"  {operands}; {tensor.name} is {shape}\n"
        f"  fix: {axis_text} in {{{listed}}}, or pad {tensor.shown(letter)} to {padded}"
    )
