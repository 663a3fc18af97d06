"""`Grid`: named axes of a process grid, and the map between ranks and coordinates.  Pure arithmetic, any size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ndtp.algebra import html
from ndtp.errors import GridError

RESERVED_NAMES = ("None", "interleaved_parallel")


def divisors(n: int) -> list[int]:
    """Every divisor of n >= 1, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@dataclass(frozen=True, init=False)
class Grid:
    """A process grid with named axes; the first axis is the slowest in rank order.

    `Grid(z=2, x=2, y=2)` has 8 ranks; rank 5 has the coordinate z=1, x=0, y=1.  Sizes may come as a mapping as well:
    `Grid({"z": 2, "x": 4})`.

    Raises:
        GridError: a size below 1, a name that is not an identifier, or no axis at all.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int] | None = None, /, **axes: int) -> None:
        if twice := set(sizes or {}) & set(axes):
            raise GridError(f"Grid axis {min(twice)} is given twice")
        named = {**(sizes or {}), **axes}
        if not named:
            raise GridError("Grid needs at least one axis, such as Grid(x=8)")
        for name, size in named.items():
            if not isinstance(name, str) or not name.isidentifier() or name in RESERVED_NAMES:
                raise GridError(f"Grid axis {name!r} is not a usable name; take an identifier such as 'x' or 'dp'")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise GridError(f"Grid axis {name} has size {size!r}; a size is an integer of at least 1")
        object.__setattr__(self, "names", tuple(named))
        object.__setattr__(self, "shape", tuple(named.values()))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, axis: str) -> int:
        """The size of an axis."""
        try:
            return self.shape[self.names.index(axis)]
        except ValueError:
            raise GridError(f"grid {self} has no axis {axis!r}; its axes are {', '.join(self.names)}") from None

    def __contains__(self, axis: object) -> bool:
        return axis in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def size(self, axes: Sequence[str]) -> int:
        """The number of ranks along several axes: the product of their sizes."""
        return math.prod([self[axis] for axis in axes])  # a list: compilers do not follow generators

    def nontrivial(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the axes, of those given and in their order, that have more than one rank."""
        return tuple(axis for axis in axes if self[axis] > 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on every axis.

        Raises:
            GridError: the grid has no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise GridError(f"grid {self} has ranks 0 to {self.num_ranks - 1}, not {rank}")
        coordinate = {}
        for name, size in zip(reversed(self.names), reversed(self.shape), strict=True):
            rank, coordinate[name] = divmod(rank, size)
        return {name: coordinate[name] for name in self.names}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; axes that are not given are at 0."""
        for axis, position in coordinate.items():
            if not 0 <= position < self[axis]:
                raise GridError(f"grid {self}: axis {axis} has positions 0 to {self[axis] - 1}, not {position}")
        rank = 0
        for name, size in zip(self.names, self.shape, strict=True):
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """The position of a rank among the ranks along `axes`, the first of `axes` being the major one."""
        coordinate = self.coordinate(rank)
        index = 0
        for axis in axes:
            index = index * self[axis] + coordinate[axis]
        return index

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axes` only, ordered by their `index` on them."""
        coordinate = self.coordinate(rank)
        ranks = [self.rank(**{axis: 0 if axis in axes else position for axis, position in coordinate.items()})]
        for axis in axes:
            size = self[axis]  # raises where there is no such axis
            stride = math.prod(self.shape[self.names.index(axis) + 1 :])
            ranks = [first + position * stride for first in ranks for position in range(size)]
        return tuple(ranks)

    def refine(self, **axes: Sequence[int]) -> Grid:
        """Return the grid of the same ranks with axes taken apart: `Grid(x=2, y=4).refine(y=(2, 2))` is `Grid(x=2,
        y1=2, y2=2)`.

        Rank order stays, the first part of an axis being the major one.  What is split over y is split over (y1 y2).

        Raises:
            GridError: sizes whose product is not that of the axis, or a name that is taken.
        """
        for axis, sizes in axes.items():
            if math.prod(sizes) != self[axis] or min(sizes, default=0) < 1:
                raise GridError(
                    f"grid {self}: axis {axis} has {self[axis]} ranks, and cannot be taken apart into {tuple(sizes)}"
                )
        named = [
            pair
            for axis, size in zip(self.names, self.shape, strict=True)
            for pair in (
                zip(self.parts(axis, len(axes[axis])), axes[axis], strict=True) if axis in axes else [(axis, size)]
            )
        ]
        if twice := [name for name, _ in named if [other for other, _ in named].count(name) > 1]:
            raise GridError(
                f"grid {self}: {', '.join(axes)} taken apart gives an axis {twice[0]}, which is there already"
            )
        return Grid(dict(named))

    @staticmethod
    def parts(axis: str, count: int) -> tuple[str, ...]:
        """The names of the parts of an axis that is taken apart."""
        return tuple(f"{axis}{i + 1}" for i in range(count))

    @classmethod
    def all(cls, num_ranks: int, names: Sequence[str] = ("z", "x", "y")) -> list[Grid]:
        """Every grid of `num_ranks` ranks over the named axes, sizes of 1 included."""

        def factorizations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
            if parts == 1:
                yield (n,)
                return
            for first in divisors(n):
                for rest in factorizations(n // first, parts - 1):
                    yield (first, *rest)

        return [cls(dict(zip(names, sizes, strict=True))) for sizes in factorizations(num_ranks, len(names))]

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))

    def _repr_html_(self) -> str:
        return html.grid_picture(self)

    def __repr__(self) -> str:
        return f"Grid({', '.join(str(self).split())})"
