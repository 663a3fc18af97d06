"""`AttentionPlan`: which heads and rows of an attention a rank has, and what it gathers of keys and values.  Pure.

Rows are those of a batch, sequence by sequence.  Heads are split over the axes of features, and sequences over those of
rows, as long as they last; where they do not, keys and values are gathered over the minor axes that cut what must be
whole: a key head that queries of several ranks share, or a sequence.  An axis of which a part would do is taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from ndtp.algebra.cached import cached_property
from ndtp.algebra.grid import Grid, divisors
from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.errors import LayoutError


@dataclass(frozen=True)
class SharedCut:
    """A list of axes, major to minor, cut in two: what stays split, and what is gathered.

    Attributes:
        refinement: axes that are taken apart for it, see `Grid.refine`; the others are named as they come out of that.
    """

    refinement: tuple[tuple[str, tuple[int, int]], ...]
    stays: tuple[str, ...]
    gathered: tuple[str, ...]

    @classmethod
    def of(cls, grid: Grid, axes: Sequence[str], ranks: int) -> SharedCut:
        """Gather over the minor `ranks` of all; over more, where these have no part of that size."""
        stays: list[str] = list(axes)
        gathered: list[str] = []
        refinement: tuple[tuple[str, tuple[int, int]], ...] = ()
        while ranks > 1:
            axis = stays.pop()
            size = grid[axis]
            if ranks % size and size % ranks == 0:
                major, minor = Grid.parts(axis, 2)
                refinement = ((axis, (size // ranks, ranks)),)
                stays.append(major)
                gathered.insert(0, minor)
                break
            gathered.insert(0, axis)
            ranks //= gcd(ranks, size)
        return cls(refinement, tuple(stays), tuple(gathered))

    def plan(self, grid: Grid, dim: int, name: str) -> RelayoutPlan:
        """Return the relayout of keys and values [2, rows, features] that gathers them along `dim`.

        Every rank uses the gathered heads for queries of its own.
        """
        refined = grid.refine(**dict(self.refinement))
        source: list[tuple[str, ...]] = [(), (), ()]
        target = list(source)
        source[dim], target[dim] = (*self.stays, *self.gathered), self.stays
        used = refined.nontrivial(self.gathered)
        return RelayoutPlan(Layout(refined, *source), Layout(refined, *target), (), used, name, "activations")


@dataclass(frozen=True)
class AttentionPlan:
    """The plan of the core of an attention, between the products.

    Args:
        layout: of queries, keys and values as the products leave them, [M, N].
        heads: of the queries.
        kv_heads: of keys and values, each for as many heads of queries.
        head_dim: features of a head.
        name: what errors and profiles call it.

    Raises:
        LayoutError: heads that the axes do not divide.
    """

    layout: Layout
    heads: int
    kv_heads: int
    head_dim: int
    name: str = "attention"

    def __post_init__(self) -> None:
        splits, grid = self.layout.num_splits(1), self.layout.grid
        axes = " ".join(f"{axis}={grid[axis]}" for axis in grid.nontrivial(self.layout.dims[1]))
        if self.heads % self.kv_heads:
            raise LayoutError(
                f"Attention '{self.name}': {self.heads} heads cannot share {self.kv_heads} heads of keys and values\n"
                f"  fix: kv_heads in {{{', '.join(map(str, divisors(self.heads)))}}}"
            )
        if self.heads % splits:
            raise LayoutError(
                f"Attention '{self.name}': {self.heads} heads are split over {axes}, and {splits} does not divide "
                f"them\n  [{self.layout.label('MN')}] on grid {grid}\n"
                f"  fix: a grid that splits heads over {{{', '.join(map(str, divisors(self.heads)))}}} ranks, or "
                f"{-(-self.heads // splits) * splits} heads"
            )
        if self.kv_heads * self.head_dim % splits:
            raise LayoutError(
                f"Attention '{self.name}': {self.kv_heads} heads of keys and values of {self.head_dim} features are "
                f"split over {axes}, and {splits} does not divide {self.kv_heads * self.head_dim}\n"
                f"  fix: a grid that splits heads over a divisor of {gcd(self.kv_heads * self.head_dim, self.heads)}"
            )

    # ------------------------------------------------------------------------------------------------------- heads

    @cached_property
    def head_cut(self) -> SharedCut:
        """The part of the head axes that cuts a single head of keys and values, or a head that several ranks share."""
        splits = self.layout.num_splits(1)
        return SharedCut.of(self.layout.grid, self.layout.dims[1], splits // gcd(self.kv_heads, splits))

    @cached_property
    def head_gather(self) -> RelayoutPlan:
        return self.head_cut.plan(self.layout.grid, 2, self.name)

    @property
    def local_heads(self) -> int:
        return self.heads // self.layout.num_splits(1)

    @property
    def local_kv_heads(self) -> int:
        """The number of heads of keys and values that a rank has after their gather."""
        return self.kv_heads // self.head_gather.target.num_splits(2)

    def first_head(self, rank: int) -> int:
        return self.layout.grid.index(rank, self.layout.dims[1]) * self.local_heads

    def kv_of(self, rank: int) -> list[int]:
        """Return, for each head of queries on this rank, the index of its head among the rank's heads of keys and
        values.
        """
        target = self.head_gather.target
        first = target.grid.index(rank, target.dims[2]) * self.local_kv_heads
        shared = self.heads // self.kv_heads
        return [
            head // shared - first for head in range(self.first_head(rank), self.first_head(rank) + self.local_heads)
        ]

    # -------------------------------------------------------------------------------------------------------- rows

    def row_cut(self, batch: int) -> SharedCut:
        """Return the part of the row axes that cuts single sequences."""
        splits = self.layout.num_splits(0)
        return SharedCut.of(self.layout.grid, self.layout.dims[0], splits // gcd(batch, splits))

    def row_gather(self, batch: int) -> RelayoutPlan:
        return self.row_cut(batch).plan(self.layout.grid, 1, self.name)

    def rows(self, batch: int, length: int) -> int:
        """Return the number of rows that a rank has.

        Raises:
            LayoutError: so many tokens do not divide; names the batches that would.
        """
        splits = self.layout.num_splits(0)
        if batch * length % splits:
            least = splits // gcd(length, splits)
            raise LayoutError(
                f"Attention '{self.name}': {batch} sequences of {length} tokens are split over {splits} ranks, which "
                f"do not divide {batch * length}\n  [{self.layout.label('MN')}] on grid {self.layout.grid}\n"
                f"  fix: a batch that is a multiple of {least}, or sequences padded to a multiple of "
                f"{splits // gcd(batch, splits)} tokens"
            )
        return batch * length // splits

    def first_row(self, rank: int, batch: int, length: int) -> int:
        """Return the index, among all rows, of the first row that a rank has."""
        return self.layout.grid.index(rank, self.layout.dims[0]) * self.rows(batch, length)

    def sequences(self, rank: int, batch: int) -> tuple[int, int]:
        """The first of the sequences of which a rank has the keys, and how many there are."""
        target = self.row_gather(batch).target
        count = batch // target.num_splits(1)
        return target.grid.index(rank, target.dims[1]) * count, count
