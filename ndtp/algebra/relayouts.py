"""`RelayoutPlan` and `MergePlan`: what a tensor, or statistics of it, take from one layout to another.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ndtp.algebra.cached import cached_property
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.steps import Step, is_legal, relayout_steps
from ndtp.algebra.volume import Traffic, Volume, traffic
from ndtp.algebra.wire import BACK, Format, Wire
from ndtp.dtypes import Dtype
from ndtp.errors import LayoutError


@dataclass(frozen=True)
class RelayoutPlan:
    """The way of a tensor from the layout `source` to the layout `target`, and that of its gradient back.

    Args:
        source, target: layouts of one tensor.
        partial: axes over which what each rank holds is an unreduced part of a sum.  It is reduced on the way.
        grad_partial: axes over which each rank uses the result for something of its own, so that the gradient which
            comes back is an unreduced part of a sum.  It is reduced on the way back.
        name: what errors and profiles call it.
        kind: of the tensor, as `ndtp.Wire` has them; "": it travels as it is.

    The gradient of a part of a sum is that of the sum, and that of what ranks use on their own is the sum of theirs: so
    the way back is again a relayout, with the two sets of axes swapped.

    Raises:
        LayoutError: layouts that are no relayout apart, or axes that split what they should sum over.
    """

    source: Layout
    target: Layout
    partial: tuple[str, ...] = ()
    grad_partial: tuple[str, ...] = ()
    name: str = "relayout"
    kind: str = ""

    def __post_init__(self) -> None:
        source, target, grid = self.source, self.target, self.source.grid
        where = f"relayout '{self.name}'"
        if target.grid != grid or source.ndim != target.ndim:
            raise LayoutError(
                f"{where}: from {source} on grid {grid} to {target} on grid {target.grid}; give layouts of one tensor "
                "on one grid"
            )
        for option, axes, layout in (("partial", self.partial, source), ("grad_partial", self.grad_partial, target)):
            for axis in axes:
                if axis not in grid:
                    raise LayoutError(f"{where}: {option}={axes}, and grid {grid} has no axis {axis!r}")
                if axis in layout.axes:
                    raise LayoutError(
                        f"{where}: {option}={axes}, and {layout} is split over {axis}: a part of a sum is whole\n"
                        f"  fix: leave {axis} out of one of them"
                    )
        if not is_legal(grid, source.dims, target.dims):
            raise LayoutError(
                f"{where}: from {source} to {target}, an axis that leaves or enters a dim is not its minor one\n"
                f"  fix: go through {source.with_dims(*((),) * source.ndim)}, the replicated layout"
            )

    def __str__(self) -> str:
        sums = ("partial", self.partial), ("grad_partial", self.grad_partial)
        over = "".join(f", {option} over {' '.join(axes)}" for option, axes in sums if axes)
        return f"relayout '{self.name}' from {self.source} to {self.target}{over}"

    @property
    def grid(self) -> Grid:
        return self.source.grid

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return relayout_steps(self.grid, self.source.dims, self.target.dims, self.partial)

    @cached_property
    def back(self) -> RelayoutPlan:
        """The way of the gradient."""
        return RelayoutPlan(*self._back)

    @property
    def _back(self) -> tuple[Any, ...]:
        kind = BACK.get(self.kind, "")
        return self.target, self.source, self.grad_partial, self.partial, self.name, kind

    @property
    def is_identity(self) -> bool:
        """Whether nothing moves, neither forward nor backward."""
        return len(self.steps) + len(self.back.steps) == 0

    def global_shape(self, shard: Sequence[int]) -> tuple[int, ...]:
        """Return the global shape of the tensor of which a rank has `shard`, as `source` lies.

        Raises:
            LayoutError: another number of dims, or a dim that `target` does not divide.
        """
        if len(shard) != self.source.ndim:
            raise LayoutError(
                f"relayout '{self.name}': the shard has {len(shard)} dims, the layouts {self.source} and {self.target}"
            )
        shape = tuple(int(size) * self.source.num_splits(dim) for dim, size in enumerate(shard))
        self.target.shard_shape(shape)
        return shape

    def volume(
        self,
        shape: Sequence[int],
        dtype: Dtype = "float32",
        wire: Wire | None = None,
        dgrad: bool = True,
        backward: str = "dgrad",
    ) -> Volume:
        """The exact traffic of a tensor of the global `shape`, in bytes received per rank.

        Args:
            dtype: in which the tensor is computed.
            wire: in which dtype it travels instead, by its `kind`.
            dgrad: whether its gradient is wanted.
            backward: the phase of that: "dgrad", or "wgrad" of a parameter.
        """
        found: list[Traffic] = []
        ways = [(self, self.source, "forward"), (self.back, self.target, backward)]
        for plan, layout, phase in ways if dgrad else ways[:1]:
            form = None if wire is None else wire.format(plan.kind)
            found += traffic(self.grid, plan.steps, layout.shard_shape(shape), phase, self.name, dtype, form)
        return Volume.of(found)


@dataclass(frozen=True)
class ExchangePlan(RelayoutPlan):
    """A relayout by one all-to-all, where several axes leave a dim and enter another in the order of the grid.

    One by one, every axis would move the whole shard: the sum of their (p-1)/p, where together they take that of the
    product of their sizes.
    """

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that split another dim after the exchange."""
        source, target = self.source, self.target
        moving = [axis for axis in source.axes if source.dim_of(axis) != target.dim_of(axis)]
        return tuple(axis for axis in self.grid.nontrivial(self.grid.names) if axis in moving)

    @cached_property
    def steps(self) -> tuple[Step, ...]:  # type: ignore[override]
        if not self.axes:
            return ()
        return (Step("all_to_all", self.axes, self.target.dim_of(self.axes[0]), self.source.dim_of(self.axes[0])),)

    @cached_property
    def back(self) -> RelayoutPlan:
        return ExchangePlan(*self._back)


@dataclass(frozen=True)
class MergePlan:
    """Statistics of rows whose features are split: what each rank knows of its part becomes what all know of the whole.

    Each rank has `given` numbers a row.  Every rank gets those of all for its share of the rows (an all-to-all), merges
    them to `merged` numbers, and hands these on (an all-gather): as many bytes as an all-reduce, for any merge and
    not for sums alone.  Two ranks exchange what they have and both merge it: as many bytes again, in one step.

    Attributes:
        axes: those that split the features and have more than one rank, in one order for every user.
    """

    grid: Grid
    features: tuple[str, ...]
    given: int
    merged: int

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.grid.nontrivial(self.grid.names) if axis in self.features)

    @property
    def ranks(self) -> int:
        return self.grid.size(self.axes)

    @property
    def exchange(self) -> Step:
        """The exchange [given, rows] -> [ranks given, rows / ranks]; with two ranks the result is [2 given, rows]."""
        if self.ranks == 2:
            return Step("all_gather", self.axes, 0)
        return Step("all_to_all", self.axes, 1, 0)

    @property
    def spread(self) -> Step | None:
        """The gather [merged, rows / ranks] -> [merged, rows] of merged values."""
        return None if self.ranks == 2 else Step("all_gather", self.axes, 1)

    def padded(self, rows: int) -> int:
        """The number of a rank's rows, rounded up to what the exchange divides."""
        return rows if self.ranks == 2 else -(-rows // self.ranks) * self.ranks

    def volume(self, rows: int, dtype: Dtype = "float32", phase: str = "forward") -> Volume:
        """The exact traffic, in bytes received per rank, for so many rows of a rank.

        Args:
            dtype: of the statistics.
        """
        if self.ranks == 1:
            return Volume()
        rows = self.padded(rows)
        entries = list(traffic(self.grid, (self.exchange,), (self.given, rows), phase, "", dtype))
        if self.spread is not None:
            entries += traffic(self.grid, (self.spread,), (self.merged, rows // self.ranks), phase, "", dtype)
        return Volume.of(entries)


def reduction_volume(
    grid: Grid,
    axes: Sequence[str],
    shape: Sequence[int],
    phase: str,
    dtype: Dtype = "float32",
    form: Format | None = None,
) -> Volume:
    """The traffic of an all-reduce over `axes` of a local tensor of `shape`."""
    used = tuple(axis for axis in grid.nontrivial(grid.names) if axis in axes)
    if not used or not prod(shape):
        return Volume()
    return Volume.of(traffic(grid, (Step("all_reduce", used),), shape, phase, "", dtype, form))
