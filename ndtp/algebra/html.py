"""Tables and pictures of grids, layouts, plans and volumes for notebooks, without a script or a style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import product
from typing import Any

from ndtp.algebra.picture import ranges

MOST_CELLS = 64  # of a picture
CELL, GAP, TEXT = 30, 10, 14  # pixels
# Pale colours that differ without colour vision, too; black text stands on each.
COLOURS = ("#cfe3f5", "#ffe0b8", "#d3ecd0", "#f3d3e6", "#e3dcf2", "#f7f1c4", "#d9d9d9", "#c9ece8")
Cell = tuple[str, str]  # text and colour


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table of plain text."""
    top = "".join(f"<th style='text-align:left'>{escape(text)}</th>" for text in head)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    said = f"<caption style='text-align:left'>{escape(caption)}</caption>" if caption else ""
    return f"<table>{said}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def lines(text: str) -> str:
    """Text whose line breaks and columns stay."""
    return f"<pre>{escape(text)}</pre>"


def grid_picture(grid: Any) -> str:
    """An SVG of the ranks: the last axis to the right, the one before downwards, one panel for each of the others."""
    names = [axis for axis in grid if grid[axis] > 1] or list(grid)[-1:]
    if grid.num_ranks > MOST_CELLS or not names:
        return lines(f"{grid}: {grid.num_ranks} ranks")
    *outer, down, right = ["", *names] if len(names) < 2 else names
    columns, rows = range(grid[right]), range(grid[down]) if down else range(1)
    panels = []
    for at in product(*(range(grid[axis]) for axis in outer)):
        place = dict(zip(outer, at, strict=True))
        cells = [[_rank_cell(grid, {**place, down: i, right: j}) for j in columns] for i in rows]
        title = " ".join(f"{axis}={i}" for axis, i in place.items())
        panels.append((title, cells, [f"{down}={i}" if down else "" for i in rows], [f"{right}={j}" for j in columns]))
    return _panels(f"{grid}: {grid.num_ranks} ranks", panels)


def _rank_cell(grid: Any, coordinate: Mapping[str, int]) -> Cell:
    rank = grid.rank(**{axis: coordinate.get(axis, 0) for axis in grid})
    return str(rank), COLOURS[rank % len(COLOURS)]


def layout_picture(layout: Any, title: str = "") -> str:
    """An SVG of a tensor's last two dims, cut as the layout says: each block names the ranks that hold it."""
    counts = [layout.num_splits(dim) for dim in range(layout.ndim)]
    shown = counts[-2:]
    if not shown or shown[0] * shown[-1] > MOST_CELLS or any(count > 1 for count in counts[:-2]):
        return lines(f"{title} {layout}".strip())
    owners: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.grid.num_ranks):
        at = tuple(piece.start for piece in layout.slices(rank, counts))
        owners.setdefault(at[-2:], []).append(rank)
    rows = range(shown[0] if len(shown) == 2 else 1)
    columns = range(shown[-1])
    keys = [[(i, j) if len(shown) == 2 else (j,) for j in columns] for i in rows]
    cells = [[(ranges(owners[key]), COLOURS[owners[key][0] % len(COLOURS)]) for key in row] for row in keys]
    dims = [" ".join(dim) or "whole" for dim in layout.dims[-2:]]
    said = f"{title} rows: {dims[0]}, columns: {dims[-1]}" if len(dims) == 2 else f"{title} {dims[0]}"
    return _panels(said.strip(), [("", cells, ["" for _ in rows], ["" for _ in columns])])


CellPanel = tuple[str, list[list[Cell]], list[str], list[str]]


def _panels(title: str, panels: Sequence[CellPanel]) -> str:
    """An SVG of tables of cells beside one another."""
    widest = max((len(cell[0]) for _, cells, _, _ in panels for row in cells for cell in row), default=1)
    width = max(CELL, 8 * widest + 8)
    margin = max((7 * len(text) + 6 for _, _, rows, _ in panels for text in rows if text), default=0)
    drawn, x, bottom = [_text(0, TEXT, title, "start")], 0, 0
    for name, cells, row_names, column_names in panels:
        top = 2 * TEXT + GAP
        if any(column_names) or name:
            top += TEXT
            drawn.append(_text(x + margin, top - TEXT - 2, name, "start"))
        for j, text in enumerate(column_names):
            drawn.append(_text(x + margin + j * width + width / 2, top - 3, text, "middle"))
        for i, row in enumerate(cells):
            drawn.append(_text(x + margin - 4, top + i * CELL + CELL / 2 + 4, row_names[i], "end"))
            for j, (text, colour) in enumerate(row):
                left, up = x + margin + j * width, top + i * CELL
                drawn.append(
                    f"<rect x='{left}' y='{up}' width='{width}' height='{CELL}' fill='{colour}' stroke='#555'/>"
                )
                drawn.append(_text(left + width / 2, up + CELL / 2 + 4, text, "middle"))
        x += margin + len(cells[0]) * width + GAP
        bottom = max(bottom, top + len(cells) * CELL)
    wide = max(x, 8 * len(title) + GAP)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{wide}' height='{bottom + 2}' role='img' "
        f"font-family='sans-serif' font-size='12'><title>{escape(title)}</title>{''.join(drawn)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' fill='#222'>{escape(text)}</text>" if text else ""
