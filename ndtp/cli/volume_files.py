"""Volumes of grids side by side, as CSV and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ndtp.algebra.volume import Volume
from ndtp.cli.common import is_first_rank, writing

# Distinguishable without colour vision (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "black")


class Line(NamedTuple):
    """A line of the file: what one grid moves under one scheme."""

    grid: str
    scheme: str
    volume: Volume


def write_csv(path: Path | None, lines: Sequence[Line]) -> None:
    """One line a grid: bytes that a rank receives forward, backward and in all, and over each set of axes."""
    if path is None or not is_first_rank():
        return
    axes = _axes(lines)
    with writing(path), open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["grid", "scheme", "forward_bytes", "backward_bytes", "bytes", *(f"bytes_{a}" for a in axes)])
        for line in lines:
            by, volume = line.volume.by("axes"), line.volume
            totals = [volume.forward, volume.backward, volume.total]
            table.writerow([line.grid, line.scheme, *totals, *(by.get(a, 0) for a in axes)])


def draw(path: Path, title: str, lines: Sequence[Line]) -> None:
    """A bar for each grid, in parts by the axes over which the bytes come."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.4 * len(lines)), layout="constrained")
    names = [f"{line.grid}, {line.scheme}" for line in lines]
    left = [0.0] * len(lines)
    for name, colour in zip(_axes(lines), COLOURS * len(_axes(lines)), strict=False):
        parts = [line.volume.by("axes").get(name, 0) / 2**20 for line in lines]
        axes.barh(range(len(lines)), parts, left=left, color=colour, label=f"over {name}")
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.set_yticks(range(len(lines)), names)
    axes.invert_yaxis()
    axes.set(xlabel="MiB received per rank and step")
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with writing(path):
        figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _axes(lines: Sequence[Line]) -> list[str]:
    return sorted({axes for line in lines for axes in line.volume.by("axes")})
