"""Pictures in plain ASCII of who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

Edge = tuple[int, int]  # of a block in one dim: start and stop


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in short: `0-3 8 10`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " ".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)


def blocks(title: str, owners: Mapping[tuple[Edge, ...], Sequence[int]]) -> str:
    """A table of a tensor's blocks, each with the ranks that hold it; one table for every block of leading dims."""
    ndim = len(next(iter(owners)))
    edges = [sorted({block[dim] for block in owners}) for dim in range(ndim)]
    lines = [title]
    for lead in product(*edges[:-2]):
        if lead:
            lines.append(f"[{', '.join(_span(edge) for edge in lead)}]")
        rows = edges[-2] if ndim > 1 else [None]
        columns = edges[-1] if ndim else [None]
        cells = [["", *(_span(column) for column in columns)]]
        for row in rows:
            held = [owners[lead + tuple(edge for edge in (row, column) if edge)] for column in columns]
            cells.append([_span(row), *(ranges(ranks) for ranks in held)])
        lines += _table(cells)
    return "\n".join(lines)


def _span(edge: Edge | None) -> str:
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
