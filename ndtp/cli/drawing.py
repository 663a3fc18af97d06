"""Panels as text for the terminal, and as SVG or PNG files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from ndtp.algebra.picture import Edge
from ndtp.cli.panels import Panel, colour_of, label_of

MAX_LEADS, MAX_ROWS = 8, 32
INK = "#303030"
FORMATS = (".svg", ".png")


def as_text(panel: Panel, width: int) -> Text:
    """A table of blocks with the ranks that hold them: colours on a terminal, plain ASCII elsewhere.

    What does not fit is left out in the middle.
    """
    text = Text(f"{panel.title}\n", style="bold")
    text.append(f"{panel.note}\n", style="not bold dim")
    for lead in panel.leads[:MAX_LEADS]:
        if len(panel.leads) > 1:
            text.append(f"[{', '.join(_span(edge) for edge in lead)}]\n", style="not bold")
        _append_table(text, panel, lead, width)
    if len(panel.leads) > MAX_LEADS:
        text.append(f"... and {len(panel.leads) - MAX_LEADS} more of these\n", style="not bold")
    return text


def _append_table(text: Text, panel: Panel, lead: tuple[Edge, ...], width: int) -> None:
    rows: list[Edge | None] = list(panel.edges[-2]) if panel.layout.ndim > 1 else [None]
    columns = panel.edges[-1]
    labels = {(row, column): label_of(panel.held(lead, row, column)) for row in rows for column in columns}
    widths = [max(len(_span(column)), *(len(labels[row, column]) for row in rows)) for column in columns]
    margin = max(len(_span(row)) for row in rows)
    fitting = max((width - margin - 8) // (max(widths) + 3), 2)
    shown_columns = _elide(range(len(columns)), fitting)
    shown_rows = _elide(range(len(rows)), MAX_ROWS)
    sizes = [3 if i is None else widths[i] for i in shown_columns]
    rule = " " * margin + " +" + "+".join("-" * (size + 2) for size in sizes) + "+\n"
    header = ["..." if i is None else _span(columns[i]) for i in shown_columns]
    text.append(
        " " * margin + "  " + " ".join(f" {h:^{s}} " for h, s in zip(header, sizes, strict=True)).rstrip() + "\n",
        "not bold",
    )
    for j in shown_rows:
        text.append(rule, "not bold dim")
        row = None if j is None else rows[j]
        text.append(f"{'...' if j is None and len(rows) > 1 else _span(row):>{margin}} ", "not bold")
        for i, size in zip(shown_columns, sizes, strict=True):
            text.append("|", "not bold dim")
            if i is None or j is None:
                text.append(f" {'...':^{size}} ", "not bold")
                continue
            colour = colour_of(panel.held(lead, row, columns[i]), panel.layout.grid.num_ranks)
            text.append(f" {labels[row, columns[i]]:^{size}} ", f"not bold black on {colour}")
        text.append("|\n", "not bold dim")
    text.append(rule, "not bold dim")


def _elide(indices: Sequence[int], fitting: int) -> list[int | None]:
    """The indices, with a None in place of the middle ones where they do not fit."""
    if len(indices) <= fitting:
        return list(indices)
    half = max(fitting // 2, 1)
    return [*indices[:half], None, *indices[len(indices) - half :]]


def _span(edge: Edge | None) -> str:
    return f"{edge[0]}:{edge[1]}" if edge else ""


def save(path: Path, rows: Sequence[Sequence[Panel]], title: str) -> None:
    """Draw rows of panels, the stages of a tensor from left to right, into an SVG or PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(map(len, rows))
    figure = Figure(figsize=(max(3.4 * columns, 5), 3.2 * len(rows) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    wrapped = textwrap.fill(title, int(12 * figure.get_figwidth()))
    if sum(map(len, rows)) > 1:
        figure.suptitle(wrapped, x=0.01, ha="left", color=INK, fontsize=10, fontweight="bold")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for row, axes in zip(rows, grid, strict=True):
        for i, axis in enumerate(axes):
            axis.set_axis_off()
            if i < len(row):
                _draw(axis, row[i])
    figure.savefig(path, dpi=120)


def _draw(axis: Any, panel: Panel) -> None:
    from matplotlib.patches import Rectangle

    flat = panel.layout.ndim < 2
    height = 1 if flat else panel.shape[-2]
    width = panel.shape[-1]
    gap = max(height // 6, 1)
    leads = panel.leads[:MAX_LEADS]
    num_blocks = max(len(panel.edges[-1]), 1 if flat else len(panel.edges[-2]) * len(leads))
    size = 9 if num_blocks <= 8 else 6 if num_blocks <= 16 else 0
    for i, lead in enumerate(leads):
        top = i * (height + gap)
        for row in [None] if flat else panel.edges[-2]:
            for column in panel.edges[-1]:
                ranks = panel.held(lead, row, column)
                y, rows = (top, height) if row is None else (top + row[0], row[1] - row[0])
                colour = colour_of(ranks, panel.layout.grid.num_ranks)
                rectangle = Rectangle((column[0], y), column[1] - column[0], rows)
                rectangle.set(facecolor=colour, edgecolor=INK, linewidth=0.7, hatch="///" if panel.partial else None)
                axis.add_patch(rectangle)
                if size:
                    box = {"facecolor": colour, "edgecolor": "none", "pad": 1.0} if panel.partial else None
                    middle = ((column[0] + column[1]) / 2, y + rows / 2)
                    axis.text(*middle, label_of(ranks), ha="center", va="center", fontsize=size, color=INK, bbox=box)
    axis.set_xlim(-0.02 * width, 1.02 * width)
    bottom = len(leads) * (height + gap) - gap
    axis.set_ylim(1.02 * bottom, -0.02 * bottom)
    axis.set_title(f"{panel.title}\n{panel.note}", fontsize=8, color=INK, loc="left")
