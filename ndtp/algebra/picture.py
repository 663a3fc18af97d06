"""Pictures in plain ASCII of who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ndtp.algebra.layout import Layout


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in short: `0-3 8 10`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " ".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)


def blocks(layout: Layout, shape: Sequence[int]) -> str:
    """A table of the blocks of a tensor, each with the ranks that hold it; one table for every block of leading dims.

    Raises:
        LayoutError: a dim that its axes do not divide.
    """
    layout.shard_shape(shape)
    owners: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(layout.grid.num_ranks):
        block = tuple((s.start, s.stop) for s in layout.slices(rank, shape))
        owners.setdefault(block, []).append(rank)
    edges = [sorted({block[dim] for block in owners}) for dim in range(layout.ndim)]
    lines = [f"{layout} of {tuple(shape)} on grid {layout.grid}; every rank holds {layout.shard_shape(shape)}"]
    for lead in product(*edges[:-2]):
        if lead:
            lines.append(f"[{', '.join(_span(edge) for edge in lead)}]")
        rows = edges[-2] if layout.ndim > 1 else [None]
        columns = edges[-1] if layout.ndim else [None]
        cells = [["", *(_span(column) for column in columns)]]
        for row in rows:
            held = [owners[lead + tuple(edge for edge in (row, column) if edge)] for column in columns]
            cells.append([_span(row), *(ranges(ranks) for ranks in held)])
        lines += _table(cells)
    return "\n".join(lines)


def _span(edge: tuple[int, int] | None) -> str:
    return f"{edge[0]}:{edge[1]}" if edge else ""


def _table(cells: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    rule = " " * widths[0] + " +" + "+".join("-" * (width + 2) for width in widths[1:]) + "+"
    lines = [
        " " * widths[0] + "  " + " ".join(f" {text:^{w}} " for text, w in zip(cells[0][1:], widths[1:], strict=True))
    ]
    for row in cells[1:]:
        body = "|".join(f" {text:^{w}} " for text, w in zip(row[1:], widths[1:], strict=True))
        lines += [rule, f"{row[0]:>{widths[0]}} |{body}|"]
    return [line.rstrip() for line in (*lines, rule)]
