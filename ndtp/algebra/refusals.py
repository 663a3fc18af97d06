"""The texts with which `MatMulPlan` refuses a product: what is wrong, the operands, the nearest thing that works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from ndtp.algebra.grid import divisors
from ndtp.algebra.layout import Layout
from ndtp.algebra.steps import Dims, is_legal
from ndtp.errors import LayoutError

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan


def shown(letter: str | None) -> str:
    """A letter as the notation has it: `M`, `B`, `B1`; `1` for a dim that is broadcast."""
    if letter is None:
        return "1"
    return letter.upper() if len(letter) == 1 else letter.replace("batch", "B", 1)


def operands(plan: MatMulPlan) -> str:
    """`A[M_zy, K_x] . B[K_xz, N_y] on grid z=2 x=2 y=2`"""
    sides = (("A", plan.a, plan.a_letters), ("B", plan.b, plan.b_letters))
    texts = (f"{tensor}[{layout.label([shown(letter) for letter in letters])}]" for tensor, layout, letters in sides)
    return f"{' . '.join(texts)} on grid {plan.grid}"


def order(plan: MatMulPlan, tensor: str, letter: str, fixed: Layout) -> NoReturn:
    """Tensors that store the axes of one letter in different orders."""
    raise LayoutError(
        f"MatMul '{plan.name}': {tensor} and the other tensors disagree on the order of the axes of "
        f"{shown(letter)}\n  {operands(plan)}\n  fix: {tensor} as {fixed}"
    )


def contiguity(plan: MatMulPlan, tensor: str, layout: Layout, need: Dims) -> NoReturn:
    """A gathered or scattered axis that is major to one that stays: its blocks would not be contiguous."""
    dims = []
    for axes, held in zip(layout.dims, need, strict=True):
        dims.append((*(axis for axis in held if axis in axes), *(axis for axis in axes if axis not in held)))
    dim = next(d for d, (s, t) in enumerate(zip(layout.dims, need, strict=True)) if not is_legal(plan.grid, (s,), (t,)))
    stays = [axis for axis in need[dim] if axis in layout.dims[dim]]
    raise LayoutError(
        f"MatMul '{plan.name}': {tensor} stores dim {dim} over ({' '.join(layout.dims[dim])}), of which "
        f"({' '.join(stays)}) must stay split in the order ({' '.join(need[dim])}); axes that are gathered or "
        f"scattered must be the minor ones, so that blocks stay contiguous\n"
        f"  {operands(plan)}\n  fix: {tensor} as {layout.with_dims(*dims)}"
    )


def size(
    plan: MatMulPlan, tensor: str, letter: str, extent: int, axes: tuple[str, ...], ranks: int, sizes: Mapping[str, int]
) -> NoReturn:
    """A dim of `extent` that its axes, `ranks` ranks in all, do not divide."""
    which = ", ".join(f"{axis} ({plan.grid[axis]})" for axis in axes)
    letters = {"A": plan.a_letters, "B": plan.b_letters, "C": plan.c_letters}[tensor]
    shape = tuple(sizes[let] if let else 1 for let in letters)
    sizes_that_fit = divisors(extent)
    shortened = sizes_that_fit if len(sizes_that_fit) <= 8 else [*sizes_that_fit[:4], "...", *sizes_that_fit[-3:]]
    listed = ", ".join(map(str, shortened))
    whole = plan.granularity(letter)
    axis_text = axes[0] if len(axes) == 1 else "the product of " + " ".join(axes)
    raise LayoutError(
        f"MatMul '{plan.name}': dim {shown(letter)} of {tensor} ({extent}) is split over axis "
        f"{which}, and {ranks} does not divide {extent}.\n"
        f"  {operands(plan)}; {tensor} is {shape}\n"
        f"  fix: {axis_text} in {{{listed}}}, or pad {shown(letter)} to {-(-extent // whole) * whole} with pad=True"
    )
