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
from ndtp.algebra.layout import Layout, default_mesh_axes
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import BlockLayouts
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
    """

    axes: tuple[str, ...]
    tokens: Layout
    up: MatMulPlan
    down: MatMulPlan

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
        """The number of parts into which the experts are split."""
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
        """The axes that split the tokens, major to minor."""
        return self.grid.nontrivial(self.tokens.dims[0])

    def check(self, hidden: int, inner: int, experts: int) -> None:
        """Refuse sizes that the layouts do not divide.

        Raises:
            LayoutError: a size and the axes that do not divide it.
        """
        (batch,) = self.up.batch_letters
        self.up.check_divides({batch: experts, "m": 0, "k": hidden, "n": inner})
        self.down.check_divides({batch: experts, "m": 0, "k": inner, "n": hidden})

    @cached_property
    def moves_features(self) -> bool:
        """Whether the result of the first product is split anew by features on its way to the second product."""
        return any(step.dim == FEATURES for name in ("C", "dC") for step in self.up.relayouts[name])

    def local_experts(self, experts: int, rank: int) -> range:
        """The experts that a rank has."""
        each, index = experts // self.ranks, self.grid.index(rank, self.axes)
        return range(index * each, (index + 1) * each)


def is_of_rows(step: Step) -> bool:
    return step.dim == ROWS and step.kind != "all_reduce"


def expert_plan(layouts: BlockLayouts, expert_axes: Sequence[str], name: str = "moe") -> ExpertPlan:
    """The plan of experts that are split over some axes, and inside as a block of these layouts is over the others.

    An axis of experts splits tokens.  Where it does so in `layouts` already, as `dp` does, or y in the 3D scheme, rows
    need not move to be sent to experts; where it splits features, or nothing, they are relaid out before.

    Args:
        expert_axes: in any order.  Experts lie in the order of parameters, which DTensors on the grid can express.

    Raises:
        LayoutError: axes that are not there, or that are named twice.
    """
    grid, named = layouts.input.grid, tuple(expert_axes)
    for axis in named:
        if axis not in grid or named.count(axis) > 1:
            raise LayoutError(
                f"MoE '{name}': expert_axis={named} does not name axes of grid {grid}, each once\n"
                f"  fix: some of {', '.join(grid)}, or () for all experts on every rank"
            )
    experts = tuple(axis for axis in default_mesh_axes(grid) if axis in named)

    def inside(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis not in experts)

    def split(layout: Layout) -> Layout:
        return Layout(grid, experts, *map(inside, layout.dims))

    taken, up, hidden, down, given = (
        split(layout)
        for layout in (layouts.input, layouts.up_weight, layouts.hidden, layouts.down_weight, layouts.output)
    )
    rows = layouts.input.dims[0]
    rows += tuple(axis for axis in grid if axis in experts and axis not in rows)
    return ExpertPlan(
        experts,
        Layout(grid, rows, inside(layouts.input.dims[1])),
        MatMulPlan(taken, up, hidden, transpose_b=True, name=f"{name}.up"),
        MatMulPlan(hidden, down, given, transpose_b=True, name=f"{name}.down"),
    )
