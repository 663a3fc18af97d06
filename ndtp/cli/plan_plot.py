"""The picture of `ndtp plan --plot`: volume and predicted step time against the number of ranks."""

from __future__ import annotations

from pathlib import Path

from ndtp.planner.request import MIB, Request
from ndtp.planner.scaling import Scaling

# Distinguishable without colour vision (Okabe and Ito), and by their markers in print.
STYLES = {"1D": ("#D55E00", "s"), "2D": ("#0072B2", "^"), "3D": ("#009E73", "D"), "best": ("black", "o")}


def draw(scaling: Scaling, request: Request, path: str | Path) -> None:
    """Write a PNG (or whatever the name's suffix says)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    counts = [point.ranks for point in scaling.bound]
    for axes, attribute, scale, label, floor in (
        (left, "volume_bytes", MIB, "MiB received per rank and step", "lower bound"),
        (right, "step_ms", 1, "predicted ms per step", "products alone"),
    ):
        for name, points in scaling.families.items():
            colour, marker = STYLES[name]
            thin = {"linewidth": 1.2, "markersize": 5} if name != "best" else {"linewidth": 2, "markersize": 4}
            shown = [(p.ranks, getattr(p, attribute) / scale) for p in points if getattr(p, attribute) > 0]
            axes.plot(*zip(*shown, strict=True) if shown else ((), ()), color=colour, marker=marker, label=name, **thin)
        least = [(p.ranks, getattr(p, attribute) / scale) for p in scaling.bound if getattr(p, attribute) > 0]
        if least:
            x, y = zip(*least, strict=True)
            axes.plot(x, y, color="grey", linestyle="--", linewidth=1, label=floor)
            axes.fill_between(x, y, [min(y) / 2] * len(y), color="grey", alpha=0.15, linewidth=0)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label)
        axes.set_xticks(counts, [str(count) for count in counts], rotation=45 if len(counts) > 8 else 0)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    block = request.main
    left.set_title(
        f"{block.tokens} tokens, hidden {block.hidden}, {block.name} {block.inner}, {request.dtype}", fontsize=9
    )
    right.set_title(f"{request.hardware.name}, {request.layers} layer{'s' * (request.layers > 1)}", fontsize=9,
                    parse_math=False)  # fmt: skip
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
