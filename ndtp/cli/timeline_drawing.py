"""A schedule as a timeline: text for the terminal, and SVG or PNG files.  What `ndtp show schedule` draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from ndtp.cli.drawing import INK
from ndtp.schedule.clocks import LaneSpan

# Pale colours that differ without colour vision too; gradients have the colour of their tensor, a shade darker.
COLOURS = {
    "A": "#9ecae9", "B": "#ffcc8f", "C": "#a5d8a0", "dA": "#5fa8d3", "dB": "#f0a04b", "dC": "#6dbb6d",
}  # fmt: skip
OTHER = "#c9c9c9"  # work that is no product: activations, copies, contention
PHASES = ("forward", "backward")
MARGIN = 10


def lanes_of(spans: Sequence[LaneSpan]) -> list[str]:
    """Return the lanes that compute, the host's, if it issues the step, and the axes that communicate."""
    return ["compute", *sorted({span.lane for span in spans} - {"compute"}, key=["host", "dp", "z", "x", "y"].index)]


def named(lane: str) -> str:
    """Return the name of a lane in pictures."""
    return lane if lane in ("compute", "host") else f"link {lane}"


def is_aside(span: LaneSpan) -> bool:
    """Return whether a span is work that neither multiplies nor sends."""
    return span.lane == "host" or (span.lane == "compute" and span.what not in ("multiply", "own"))


def colour_of(span: LaneSpan) -> str:
    if is_aside(span):
        return OTHER
    return COLOURS[span.tensor]


def label_of(span: LaneSpan) -> str:
    """The tensor, the number of the product, and the chunk; other work by its first letter."""
    chunk = "" if span.chunk is None else f"[{span.chunk}]"
    if is_aside(span):
        return {"activate": "f", "order": "copy", "contention": "held", "sum": "sum"}.get(span.what, "")
    return f"{span.tensor}{span.product}{chunk}"


def as_text(spans: Sequence[LaneSpan], width: int) -> Iterator[Text]:
    """A picture for each phase: a line for each lane, its spans as wide as they take time."""
    for phase in PHASES:
        found = [span for span in spans if span.phase == phase]
        if not found:
            continue
        begin = 0.0 if phase == "forward" else min(span.begin for span in found)
        end = max(span.end for span in found)
        text = Text(f"{phase}, {begin * 1e3:.4g} to {end * 1e3:.4g} ms\n", style="bold")
        for lane in lanes_of(spans):
            text.append(f"{named(lane):<{MARGIN}}", "not bold")
            _append_lane(text, [span for span in found if span.lane == lane], begin, end, width - MARGIN - 1)
            text.append("\n")
        yield text


def _append_lane(text: Text, spans: Sequence[LaneSpan], begin: float, end: float, cells: int) -> None:
    """Every span gets a cell at least, as long as there are any; later spans begin where earlier ones end."""
    at = 0
    for span in sorted(spans, key=lambda span: span.begin):
        left = max(at, int((span.begin - begin) / (end - begin) * cells))
        right = min(cells, max(left + 1, round((span.end - begin) / (end - begin) * cells)))
        text.append("." * (left - at), "not bold dim")
        label = label_of(span)[: max(0, right - left - 1)] if right - left > 1 else label_of(span)[: right - left]
        fill = "=" if span.lane == "compute" else "-"
        text.append(f"{label:{fill}<{right - left}}", f"not bold black on {colour_of(span)}")
        at = max(at, right)
    text.append("." * (cells - at), "not bold dim")


def save(path: Path, spans: Sequence[LaneSpan], title: str) -> None:
    """Draw the lanes into an SVG or PNG file, forward and backward on one axis of time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = lanes_of(spans)
    figure = Figure(figsize=(12, 1.4 + 0.55 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    last = max(span.end for span in spans)
    for span in spans:
        row, length = lanes.index(span.lane), span.end - span.begin
        axes.broken_barh([(span.begin * 1e3, length * 1e3)], (row - 0.4, 0.8), facecolor=colour_of(span),
                         edgecolor=INK, linewidth=0.4)  # fmt: skip
        if length / last > 0.0045 * len(label_of(span)):
            middle = (span.begin + span.end) / 2 * 1e3
            axes.text(middle, row, label_of(span), ha="center", va="center", fontsize=6, color=INK)
    _mark_backward(axes, spans)
    axes.set(xlim=(0, last * 1e3), ylim=(len(lanes) - 0.4, -0.6), xlabel="ms")
    axes.set_yticks(range(len(lanes)), [named(lane) for lane in lanes])
    axes.set_title(title, fontsize=9, color=INK, loc="left", parse_math=False)
    used = [tensor for tensor in COLOURS if any(span.tensor == tensor for span in spans)]
    patches = [Patch(facecolor=COLOURS[tensor], label=tensor) for tensor in used]
    figure.legend(handles=[*patches, Patch(facecolor=OTHER, label="no product")], ncols=7, fontsize=7,
                  loc="outside lower right", frameon=False)  # fmt: skip
    figure.savefig(path, dpi=120)


def _mark_backward(axes: Any, spans: Sequence[LaneSpan]) -> None:
    backward = [span.begin for span in spans if span.phase == "backward" and span.lane != "host"]
    if backward:
        axes.axvline(min(backward) * 1e3, color=INK, linewidth=0.8, linestyle=":")
