"""The picture of `ndtp demo`: loss curves that coincide, how far they do, and what each grid moves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndtp.cli.demo_training import DemoRun, GridRun

CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
AXES = {"x": "#56b4e9", "y": "#f0a860", "z": "#8fcfb0"}
OTHER = "#b8b8b8"
INK = "#303030"


def draw(path: Path, dense: DemoRun, runs: Sequence[GridRun], tolerance: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(  # type: ignore[misc]
        1, 2, width_ratios=(1.25, 1)
    )
    losses, deviations = left.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    volumes = right.subplots()
    steps = range(1, len(dense.losses) + 1)

    losses.plot(steps, dense.losses, color="#c8c8c8", linewidth=8, label="dense", solid_capstyle="round")
    for i, run in enumerate(runs):
        colour = CURVES[i % len(CURVES)]
        # Dashes that take turns: all curves stay visible where they coincide.
        dashes = (4 * i, (4, 4 * (len(runs) - 1))) if len(runs) > 1 else "-"
        losses.plot(steps, run.by_rank[0].losses, color=colour, linewidth=2.2, linestyle=dashes, label=run.name)
        off = [abs(a - b) for a, b in zip(run.by_rank[0].losses, dense.losses, strict=True)]
        deviations.plot(steps, [value or float("nan") for value in off], color=colour, linewidth=0, marker=".")
    losses.set_title("Loss: dense and every grid coincide", loc="left", color=INK, fontweight="bold")
    losses.set_ylabel("cross entropy per byte")
    legend = losses.legend(frameon=False, handlelength=2.5)
    for line in legend.get_lines()[1:]:
        line.set_linestyle("-")
    deviations.set_title("distance from the dense loss (where it is not zero)", loc="left", color=INK, fontsize=10)
    deviations.set_yscale("log")
    deviations.set_ylim(1e-8, 1e-2)
    deviations.axhline(tolerance, color=INK, linewidth=1, linestyle=":")
    deviations.annotate(
        "tolerance", (1, tolerance), xycoords=("axes fraction", "data"), xytext=(0, 3),
        textcoords="offset points", ha="right", color=INK, fontsize=9,
    )  # fmt: skip
    deviations.set_xlabel("step")
    _draw_volumes(volumes, runs)
    for axes in (losses, deviations, volumes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e8e8e8")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)


def _draw_volumes(volumes: Any, runs: Sequence[GridRun]) -> None:
    names = [run.name.replace(" ", "\n", 1) for run in runs]
    bottoms = [0.0] * len(runs)
    for axis in dict.fromkeys(axis for run in runs for axis in sorted(run.by_rank[0].by_axes)):
        heights = [run.by_rank[0].by_axes.get(axis, 0) / 1024 for run in runs]
        label = f"predicted, over {axis}"
        volumes.bar(names, heights, 0.55, bottom=bottoms, color=AXES.get(axis, OTHER), label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    measured = [run.measured_bytes / 1024 for run in runs]
    volumes.scatter(names, measured, marker="_", s=2600, linewidths=2.5, color=INK, zorder=3)
    volumes.plot([], [], color=INK, linewidth=2.5, label="measured")
    for i, value in enumerate(measured):
        volumes.annotate(f"{value:,.0f}", (i, value), textcoords="offset points", xytext=(0, 6), ha="center", color=INK)
    volumes.set_title("Volume: KiB received per rank and step", loc="left", color=INK, fontweight="bold")
    volumes.set_ylabel("KiB")
    volumes.set_ylim(0, 1.22 * max([*measured, *bottoms, 1]))
    volumes.legend(frameon=False, ncols=2, loc="upper left")
