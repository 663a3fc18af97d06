"""A picture of one step: what every rank computes, waits for and has in flight, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndtp.measure.overlap_trace import RankTrace, lanes

# Distinguishable without colour vision (Okabe and Ito); waits are hatched as well.
GEMM, OTHER, WAIT = "#0072B2", "#56B4E9", "#D55E00"
AXES = ("#009E73", "#E69F00", "#CC79A7", "#F0E442", "#999999")


def draw(traces: Sequence[RankTrace], title: str, path: str | Path) -> None:
    """Write a PNG (or whatever the name's suffix says): a panel a rank, a row a lane, milliseconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [lanes(trace) for trace in traces]
    axes = sorted({span.axes for trace in traces for span in trace.spans if span.kind == "collective"})
    colours = {each: AXES[i % len(AXES)] for i, each in enumerate(axes)}
    size = (12, 1.6 + 0.17 * sum(map(len, rows)) + 0.25 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [len(each) for each in rows]
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False, height_ratios=heights)
    for panel, trace, found in zip(panels[:, 0], traces, rows, strict=True):
        first = {name: i for i, (name, _) in reversed(list(enumerate(found)))}
        for i, (_, spans) in enumerate(found):
            for kind, style in (
                ("gemm", {"facecolor": GEMM}),
                ("other", {"facecolor": OTHER}),
                ("wait", {"facecolor": "white", "edgecolor": WAIT, "hatch": "//////", "linewidth": 0.4}),
            ):
                bars = [_bar(span) for span in spans if _sort(span) == kind]
                panel.broken_barh(bars, (i - 0.45, 0.9), **style)
            for each in axes:
                bars = [_bar(span) for span in spans if span.kind == "collective" and span.axes == each]
                panel.broken_barh(bars, (i - 0.4, 0.8), facecolor=colours[each], edgecolor="black", linewidth=0.3)
        panel.set_yticks(list(first.values()), list(first), fontsize=7)
        panel.set_ylim(len(found) - 0.5, -0.5)
        panel.set_ylabel(trace.name.replace(" (", "\n("), rotation=0, ha="right", va="center", fontsize=8)
        panel.axvline(trace.step * 1e3, color="black", linewidth=0.8)
        panel.grid(axis="x", alpha=0.3)
    panels[-1, 0].set_xlabel("ms since the step's barrier; black: the rank's gradients are complete")
    legend = [
        Patch(facecolor=GEMM, label="product"),
        Patch(facecolor=OTHER, label="other local work"),
        Patch(facecolor="white", edgecolor=WAIT, hatch="//////", label="exposed wait"),
        *(Patch(facecolor=colours[each], label=f"in flight over {' '.join(each)}") for each in axes),
    ]
    figure.legend(handles=legend, loc="outside upper center", ncols=len(legend), fontsize=8, frameon=False)
    panels[0, 0].set_title(title, fontsize=9)
    panels[0, 0].set_xlim(0, max(trace.step for trace in traces) * 1.01e3)
    figure.savefig(path, dpi=130)


def _sort(span: Any) -> str:
    if span.kind != "compute":
        return span.kind
    return "gemm" if span.name.startswith("gemm") else "other"


def _bar(span: Any) -> tuple[float, float]:
    return span.start * 1e3, (span.end - span.start) * 1e3
