"""The picture of `ndtp train`: the loss of a run, piece by piece of the grids that it was on, and of other runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ndtp.cli.demo_picture import CURVES, INK
from ndtp.cli.training import LOG, read_log

COLOURS = (*CURVES, "#56b4e9", "#000000", "#8c564b")


def draw(path: Path, folders: Sequence[Path]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    logs = [(folder.name, read_log(folder / LOG)) for folder in folders]
    count = 0
    for i, (name, rows) in enumerate(logs):
        # Dashes that take turns: all curves stay visible where they coincide.
        dashes = (4 * i, (4, 4 * (len(logs) - 1))) if len(logs) > 1 else "-"
        for grid, piece in groupby(rows, key=lambda row: row["grid"]):
            points = [(int(row["step"]), float(row["loss"])) for row in piece]
            label = grid if len(logs) == 1 or grid == name else f"{name}: {grid}"
            axes.plot(*zip(*points, strict=True), color=COLOURS[count % len(COLOURS)], linestyle=dashes, label=label)
            count += 1
    axes.set_title("Loss", loc="left", color=INK, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy per byte")
    axes.grid(axis="y", color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    if count:
        for handle in axes.legend(frameon=False).get_lines():
            handle.set_linestyle("-")
    figure.savefig(path, dpi=110)
