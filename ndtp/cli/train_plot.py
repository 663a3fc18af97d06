"""The picture of `ndtp train`: the loss of a run, piece by piece of the grids that it was on, and of other runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ndtp.cli.demo_picture import CURVES, INK
from ndtp.cli.train_log import LOG, read_log

COLOURS = (*CURVES, "#56b4e9", "#000000", "#8c564b")


def draw(path: Path, folders: Sequence[Path]) -> None:
    figure = figure_of((9, 5))
    axes = figure.subplots()
    curves(axes, folders)
    axes.set_title("Loss", loc="left", color=INK, fontweight="bold")
    axes.set_xlabel("step")
    figure.savefig(path, dpi=110)


def figure_of(inches: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def curves(axes: Any, folders: Sequence[Path]) -> None:
    """The loss of each run, in a colour for each grid."""
    count = 0
    for i, folder in enumerate(folders):
        # Dashes that take turns: all curves stay visible where they coincide.
        dashes = (4 * i, (4, 4 * (len(folders) - 1))) if len(folders) > 1 else "-"
        for grid, piece in groupby(read_log(folder / LOG), key=lambda row: row["grid"]):
            points = [(int(row["step"]), float(row["loss"])) for row in piece]
            label = grid if len(folders) == 1 or grid == folder.name else f"{folder.name}: {grid}"
            axes.plot(*zip(*points, strict=True), color=_colour(count), linestyle=dashes, label=label)
            count += 1
    axes.set_ylabel("cross entropy per byte")
    _plain(axes)
    if count:
        for handle in axes.legend(frameon=False).get_lines():
            handle.set_linestyle("-")


def distances(axes: Any, folders: Sequence[Path]) -> None:
    """Draw how far the losses of the other runs are from the first one's, in the colours of `curves`."""
    first, *others = ([(int(row["step"]), row["grid"], float(row["loss"])) for row in read_log(folder / LOG)]
                      for folder in folders)  # fmt: skip
    expected = {step: loss for step, _, loss in first}
    count = len(list(groupby(first, key=lambda row: row[1])))
    for rows in others:
        for _, piece in groupby(rows, key=lambda row: row[1]):
            points = [(step, abs(loss - expected[step])) for step, _, loss in piece if step in expected]
            axes.plot(*zip(*points, strict=True), color=_colour(count), marker=".", linestyle="none", markersize=3)
            count += 1
    axes.set_xlabel("step")
    axes.set_ylabel(f"distance from {folders[0].name}")
    _plain(axes)


def _colour(count: int) -> str:
    return COLOURS[count % len(COLOURS)]


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
