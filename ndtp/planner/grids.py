"""`Grids`: sizes of the axes of many grids at once.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import numpy as np

from ndtp.algebra.grid import Grid, divisors

AXES = ("dp", "z", "x", "y")
EXPERT_AXES = ("dp", "e", "z", "x", "y")  # where there are experts: e splits them, and others' rows as dp does
# An integer or a float, or a numpy array that has one for each of many grids.
PerGrid: TypeAlias = Any
FOLDED = {"z": 0, "x": 1, "y": 2}  # the bit of `Grids.fold`


@dataclass(frozen=True)
class Grids:
    """Sizes of the axes of many grids: arrays of one shape (integers do as well).

    Attributes:
        e: beside the four: splits experts, and the rows of everything else.
        fold: which of z, x and y split experts, too: bits by `FOLDED`.
    """

    dp: PerGrid
    z: PerGrid
    x: PerGrid
    y: PerGrid
    e: PerGrid = 1
    fold: PerGrid = 0

    @property
    def ranks(self) -> PerGrid:
        return self.dp * self.e * self.z * self.x * self.y

    @property
    def data_axis(self) -> str:
        """The name of the axes that split rows and nothing else."""
        return "dp" if isinstance(self.e, int) and self.e == 1 else "data"

    def inside(self, experts: int) -> Grids:
        """The grid of a block's products: e is a part of dp where there are no experts; else what does not split them.

        The latter has fewer ranks, by those along the axes of experts.
        """
        if not experts:
            return Grids(self.dp * self.e, self.z, self.x, self.y)
        return Grids(self.dp, *(self._part(axis, 0) for axis in FOLDED))

    def over(self, experts: int) -> PerGrid:
        """The ranks along the axes of experts."""
        if not experts:
            return 1
        return self.e * self._part("z", 1) * self._part("x", 1) * self._part("y", 1)

    def _part(self, axis: str, folded: int) -> PerGrid:
        """The size of an axis where its bit is this, else 1."""
        is_it = (self.fold >> FOLDED[axis] & 1) == folded
        return 1 + (getattr(self, axis) - 1) * is_it

    def splits(self, name: str) -> dict[str, PerGrid]:
        """Return, for a set of axes, the size of each axis in it, and 1 for the others; an axis is a set of itself."""
        if name in EXPERT_AXES:
            return {name: getattr(self, name)}
        folded = {axis: self._part(axis, 1) for axis in FOLDED}
        return {
            "data": {"dp": self.dp, "e": self.e},
            "experts": {"e": self.e, **folded},
            "counts": {"e": self.e, **folded, "y": self.y},  # gathered over y, or split by it
            "scores": {"z": self.z, "y": self.y},
            "gates": {"z": self.z, "y": self.y, "x": folded["x"]},
            "rows": {"dp": self.dp, "e": self.e, "z": self.z, "y": self.y, "x": folded["x"]},
        }[name]

    @classmethod
    def all(cls, ranks: int, experts: bool = False) -> Grids:
        """Every factorization of a number of ranks; with experts, over e and every choice of other axes."""
        below = {n: divisors(n) for n in divisors(ranks)}
        sizes: list[tuple[int, ...]] = [
            (dp, z, x, ranks // (dp * z * x))
            for dp in below[ranks]
            for z in below[ranks // dp]
            for x in below[ranks // (dp * z)]
        ]
        if experts:
            sizes = [
                (dp // e, z, x, y, e, fold)
                for dp, z, x, y in sizes
                for e in below[dp]
                for fold in range(1 << len(FOLDED))
                if all(size > 1 or not fold >> FOLDED[axis] & 1 for axis, size in (("z", z), ("x", x), ("y", y)))
            ]
        return cls(*np.array(sizes, dtype=np.int64).T)

    def _each(self, change: Callable[[PerGrid], object]) -> Grids:
        return Grids(*(each if isinstance(each, int) else change(each) for each in astuple(self)))

    def take(self, index: object) -> Grids:
        return self._each(lambda each: each[index])

    def unbounded(self) -> Grids:
        """Return the grids with Python's integers, which do not overflow and take ten times as long."""
        return self._each(lambda each: each.astype(object))

    def bounded(self) -> Grids:
        """Return the grids with numpy's integers again."""
        return self._each(lambda each: np.asarray(each, dtype=np.int64))


def grids_of(grid: Grid, expert_axis: Sequence[str] | None = None) -> Grids:
    """One grid, whose axes are some of these."""
    sizes = dict.fromkeys(AXES, 1) | dict(zip(grid.names, grid.shape, strict=True))
    return Grids(**sizes, fold=sum(1 << FOLDED[axis] for axis in expert_axis or () if axis in FOLDED))
