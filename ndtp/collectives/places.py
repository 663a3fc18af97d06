"""The places of ranks of the world on the grids of a program, to name them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ndtp.algebra.grid import Grid

KEPT = 16  # grids


class Places:
    """The last grids, and the rank of the world at each of their places."""

    def __init__(self) -> None:
        self._grids: list[tuple[Grid, tuple[int, ...]]] = []

    def add(self, grid: Grid, ranks: Sequence[int]) -> None:
        """Remember where ranks are on a grid."""
        entry = grid, tuple(ranks)
        if entry in self._grids:
            self._grids.remove(entry)
        self._grids.append(entry)
        del self._grids[:-KEPT]

    def axes_between(self, ranks: Sequence[int], others: Sequence[int]) -> tuple[str, ...]:
        """Return the axes of the last grid that has these ranks, along which some of the others lie beside them."""
        for grid, known in reversed(self._grids):
            if set(ranks) <= set(known):
                pairs = [(grid.coordinate(known.index(a)), grid.coordinate(known.index(b)))
                         for a in ranks for b in others if b in known and b != a]  # fmt: skip
                apart = [[axis for axis in grid.names if one[axis] != other[axis]] for one, other in pairs]
                return tuple(axis for axis in grid.names if [axis] in apart)
        return ()

    def name_of(self, rank: int) -> str:
        """Return the coordinate on the last grid that has the rank, as text: " (y=1, x=0)"."""
        for grid, ranks in reversed(self._grids):
            if rank in ranks:
                return f" ({', '.join(f'{a}={i}' for a, i in grid.coordinate(ranks.index(rank)).items())})"
        return ""
