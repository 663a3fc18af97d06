"""The errors with which `MatMulPlan` refuses a product: what is wrong, the operands, the nearest thing that works."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ndtp.algebra.grid import divisors
from ndtp.algebra.layout import Layout
from ndtp.algebra.steps import Dims, is_legal
from ndtp.errors import LayoutError


def shown(letter: str | None) -> str:
    """A letter as the notation has it: `M`, `B`, `B1`; `1` for a dim that is broadcast."""
    if letter is None:
        return "1"
    return letter.upper() if len(letter) == 1 else letter.replace("batch", "B", 1)


def order(name: str, operands: str, tensor: str, letter: str, fixed: Layout) -> LayoutError:
    """Tensors that store the axes of one letter in different orders."""
    return LayoutError(
        f"MatMul '{name}': {tensor} and the other tensors disagree on the order of the axes of "
        f"{shown(letter)}\n  {operands}\n  fix: {tensor} as {fixed}"
    )


def contiguity(name: str, operands: str, tensor: str, layout: Layout, need: Dims) -> LayoutError:
    """A gathered or scattered axis that is major to one that stays: its blocks would not be contiguous."""
    dims = []
    for axes, held in zip(layout.dims, need, strict=True):
        dims.append((*(axis for axis in held if axis in axes), *(axis for axis in axes if axis not in held)))
    dim = next(
        d for d, (s, t) in enumerate(zip(layout.dims, need, strict=True)) if not is_legal(layout.grid, (s,), (t,))
    )
    stays = [axis for axis in need[dim] if axis in layout.dims[dim]]
    return LayoutError(
        f"MatMul '{name}': {tensor} stores dim {dim} over ({' '.join(layout.dims[dim])}), of which "
        f"({' '.join(stays)}) must stay split in the order ({' '.join(need[dim])}); axes that are gathered or "
        f"scattered must be the minor ones, so that blocks stay contiguous\n"
        f"  {operands}\n  fix: {tensor} as {layout.with_dims(*dims)}"
    )


def size(
    name: str,
    operands: str,
    tensor: str,
    shape: tuple[int, ...],
    letter: str,
    extent: int,
    axes: Mapping[str, int],
    whole: int,
) -> LayoutError:
    """A dim of `extent` that its axes do not divide; a multiple of `whole` would be divided wherever it is split."""
    which = ", ".join(f"{axis} ({ranks})" for axis, ranks in axes.items())
    sizes_that_fit = divisors(extent)
    shortened = sizes_that_fit if len(sizes_that_fit) <= 8 else [*sizes_that_fit[:4], "...", *sizes_that_fit[-3:]]
    listed = ", ".join(map(str, shortened))
    axis_text = next(iter(axes)) if len(axes) == 1 else "the product of " + " ".join(axes)
    return LayoutError(
        f"MatMul '{name}': dim {shown(letter)} of {tensor} ({extent}) is split over axis "
        f"{which}, and {prod(axes.values())} does not divide {extent}.\n"
        f"  {operands}; {tensor} is {shape}\n"
        f"  fix: {axis_text} in {{{listed}}}, or pad {shown(letter)} to {-(-extent // whole) * whole} with pad=True"
    )
