"""`ExpertPlan`: experts as a batch dim of two products, and how their axes share a grid with those inside.  Pure.

    tokens   [T_e.., K]           as the layer takes its rows to the experts: e splits rows, as data parallelism does
    A        [E_e, M, K]          the same rows at their experts: e has become an axis of the batch dim
    up       [E_e, N, K]  down [E_e, K, N]

Between `tokens` and A goes an all-to-all over e, of as many rows as the routing says; everything else is a product
with a batch dim, 1D, 2D or 3D inside, whose rows are ragged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import SCHEMES, TENSOR_AXES, BlockLayouts
from ndtp.algebra.steps import Step
from ndtp.errors import LayoutError

ROWS, FEATURES = 1, 2  # dims of A and C, behind that of the experts


@dataclass(frozen=True)
class ExpertPlan:
    """The products of a layer of experts.

    Attributes:
        axes: those that split the experts, major to minor.
        tokens: the layout of the rows that are sent to experts and come back.
        up, down: the plans of the two products, `[experts, rows, features]`.
        beside: the layouts of an MLP of the same scheme for the same tokens, which all ranks of `axes` have.
    """

    axes: tuple[str, ...]
    tokens: Layout
    up: MatMulPlan
    down: MatMulPlan
    beside: BlockLayouts

    def __post_init__(self) -> None:
        if self.up.a.dims != self.down.out.dims:
            raise LayoutError(
                f"{self.up.where}: experts take their rows as {self.up.a} and give them back as {self.down.out}\n"
                "  fix: layouts that end as they begin"
            )
        for plan in (self.up, self.down):
            for tensor in ("A", "C", "dA", "dC"):
                for step in plan.relayouts[tensor]:
                    if step.dim == ROWS and step.kind not in ("all_gather", "reduce_scatter"):
                        raise LayoutError(
                            f"{plan.where}: rows of experts are ragged; they are gathered and scattered, and {tensor} "
                            f"would take a {step.kind} over {' '.join(step.axes)}\n  {plan.operands}\n"
                            "  fix: a named scheme inside the experts"
                        )

    @property
    def grid(self) -> Grid:
        return self.tokens.grid

    @property
    def ranks(self) -> int:
        """By how many the experts are split."""
        return self.grid.size(self.axes)

    @property
    def features(self) -> tuple[str, ...]:
        """The axes that split the features of tokens."""
        return self.tokens.dims[1]

    @cached_property
    def gathered(self) -> tuple[str, ...]:
        """The axes over which rows are gathered on their way into the first product, in that order."""
        return tuple(axis for step in self.up.relayouts["A"] if is_of_rows(step) for axis in step.axes)

    @cached_property
    def count_axes(self) -> tuple[str, ...]:
        """The axes along which a rank has to know how many rows others have for which expert: in the grid's order."""
        wanted = {*self.axes, *self.gathered}
        return tuple(axis for axis in self.grid.nontrivial(self.grid.names) if axis in wanted)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Those that split the tokens, major to minor."""
        return self.grid.nontrivial(self.tokens.dims[0])

    def check(self, hidden: int, inner: int, experts: int) -> None:
        """
        Raises:
            LayoutError: sizes that the layouts do not divide.
        """
        (batch,) = self.up.batch_letters
        self.up.check_divides({batch: experts, "m": 0, "k": hidden, "n": inner})
        self.down.check_divides({batch: experts, "m": 0, "k": inner, "n": hidden})

    @cached_property
    def moves_features(self) -> bool:
        """Whether what the first product leaves is split anew by features on its way to the second."""
        return any(step.dim == FEATURES for name in ("C", "dC") for step in self.up.relayouts[name])

    def local_experts(self, experts: int, rank: int) -> range:
        """The experts that a rank has."""
        each, index = experts // self.ranks, self.grid.index(rank, self.axes)
        return range(index * each, (index + 1) * each)


def is_of_rows(step: Step) -> bool:
    return step.dim == ROWS and step.kind != "all_reduce"


def expert_plan(
    grid: Grid,
    scheme: str,
    axes: Sequence[str | None] | None = None,
    expert_axes: Sequence[str] = ("e",),
    name: str = "moe",
    rows_as: Sequence[str] = (),
) -> ExpertPlan:
    """The plan of a named scheme inside experts that are split over `expert_axes`.

    Args:
        axes: those that play x, y (and z) inside, as for `ndtp.algebra.schemes.block_layouts`; one that splits the
            experts, or None, plays no part there.  Default: those of these names.
        expert_axes: any axes of the grid.  All others that the scheme does not use split rows, in front.
        rows_as: axes that shall come first among those that split rows, in this order: where rows that lie so already
            need not move.

    Raises:
        LayoutError: an unknown scheme, axes that are not there or named twice.
    """
    where = f"MoE '{name}'"
    if scheme not in SCHEMES:
        raise LayoutError(f"{where}: scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
    experts = tuple(expert_axes)
    for axis in experts:
        if axis not in grid or experts.count(axis) > 1:
            raise LayoutError(
                f"{where}: expert_axis={experts} does not name axes of grid {grid}, each once\n"
                f"  fix: some of {', '.join(grid)}, or () for all experts on every rank"
            )
    count = {"1d": None, "2d": 2, "3d": 3}[scheme[:2]]
    given = TENSOR_AXES[:count] if axes is None else tuple(axes)
    if axes is not None and (
        count not in (None, len(given)) or any(axis is not None and axis not in grid for axis in given)
    ):
        wanted = "axes" if count is None else f"{count} axes"
        raise LayoutError(f"{where}: scheme {scheme!r}: axes={given} does not name {wanted} of grid {grid}")
    used = [axis if axis is not None and axis in grid and axis not in experts else None for axis in given]
    if axes is None and count == 2 and "z" in grid and "z" not in experts and grid["z"] > 1:
        raise LayoutError(
            f"{where}: scheme {scheme!r} uses the axes x and y, and grid {grid} has z={grid['z']}\n"
            "  fix: scheme '3d', a grid with z=1, or z among the experts' axes"
        )
    groups: list[tuple[str, ...]] = [(axis,) if axis else () for axis in used]
    if count is None:
        groups = [tuple(axis for axis in used if axis)]
    inside = {axis for group in groups for axis in group}
    idle = () if axes is not None else TENSOR_AXES
    others = tuple(axis for axis in grid if axis not in inside and axis not in experts and axis not in idle)
    dims = SCHEMES[scheme](*groups)

    def rows(index: int) -> Layout:
        return Layout(grid, experts, others + dims[index][0], dims[index][1])

    def weight(index: int) -> Layout:
        return Layout(grid, experts, *dims[index])

    place = {axis: i for i, axis in enumerate((*rows_as, *grid)) if axis in experts or axis in others}
    place = {axis: rows_as.index(axis) if axis in rows_as else i for axis, i in place.items()}
    in_front = tuple(sorted(place, key=place.__getitem__))
    beside = BlockLayouts(
        *(Layout(grid, in_front * (i % 2 == 0) + split[0], *split[1:]) for i, split in enumerate(dims))
    )
    return ExpertPlan(
        experts,
        beside.input,
        MatMulPlan(rows(0), weight(1), rows(2), transpose_b=True, name=f"{name}.up"),
        MatMulPlan(rows(2), weight(3), rows(4), transpose_b=True, name=f"{name}.down"),
        beside,
    )
