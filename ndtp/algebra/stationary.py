"""Products of few rows, whole on every rank, with weights that stay where they lie: which axes split what.  Pure.

Each rank multiplies its part of the features of all rows by its shard of the weight, and one all-reduce adds up what
the ranks have.  Source: Pope et al. 2022, "Efficiently scaling transformer inference".
"""

from __future__ import annotations

from ndtp.algebra.grid import Grid

WHOLE_ROWS = 64  # of a dp rank: so many rows without gradients are whole on every rank of a model

Axes = tuple[str, ...]


def in_common(some: Axes, others: Axes) -> Axes:
    """Return the axes with which both begin."""
    count = 0
    while count < min(len(some), len(others)) and some[count] == others[count]:
        count += 1
    return some[:count]


def summed_axes(grid: Grid, out: Axes, into: Axes, taken: Axes) -> Axes:
    """Return the axes over which a product is summed, in the order of the grid.

    Args:
        out, taken: the axes that split the weight's features out and in.
        into: those that split the features of the result, with which `out` begins.
    """
    return tuple(a for a in grid.nontrivial(grid.names) if a in (*out, *taken) and a not in into)
