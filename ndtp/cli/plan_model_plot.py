"""The picture of `ndtp plan --model --plot`: what a step is made of, and what memory it needs, split by split."""

from __future__ import annotations

from pathlib import Path

from ndtp.planner.training.choose import GIB, SplitChoice

COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#000000", "#8DA0CB",
           "#B3DE69", "#FB8072", "#BC80BD")  # fmt: skip


def draw(choices: list[SplitChoice], path: str | Path) -> None:
    """Write a PNG (or whatever the name's suffix says)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 2.2 + 0.4 * len(choices)), layout="constrained")
    names = [f"{i}. {each.splits}" for i, each in enumerate(choices, 1)]
    for axes, parts, scale, label in (
        (left, [each.time.parts() for each in choices], 1.0, "predicted s per step"),
        (right, [each.memory.parts() for each in choices], GIB, "GiB per rank"),
    ):
        at = [0.0] * len(choices)
        for name, colour in zip(parts[0], COLOURS, strict=False):
            widths = [part[name] / scale for part in parts]
            if max(widths) > 0.005 * max(sum(part.values()) / scale for part in parts):
                axes.barh(names, widths, left=at, color=colour, label=name)
            at = [begin + width for begin, width in zip(at, widths, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel=label)
        axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # above: bars fill the axes
    right.axvline(choices[0].question.room / GIB, color="grey", linestyle="--")
    right.set_yticks([])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
