"""The panels of `ndtp show`: which rank holds which block of a tensor, at each stage of a plan. Pure."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.picture import Edge, ranges
from ndtp.algebra.steps import Step
from ndtp.algebra.stored import shown

PHASES = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Panel:
    """A tensor of a global `shape` as it lies at one moment; `partial` are axes over which it is an unreduced sum."""

    title: str
    layout: Layout
    shape: tuple[int, ...]
    partial: tuple[str, ...] = ()
    step: str | None = None

    @cached_property
    def owners(self) -> dict[tuple[Edge, ...], list[int]]:
        """Block -> the ranks that hold it."""
        owners: dict[tuple[Edge, ...], list[int]] = {}
        for rank in range(self.layout.grid.num_ranks):
            block = tuple((part.start, part.stop) for part in self.layout.slices(rank, self.shape))
            owners.setdefault(block, []).append(rank)
        return owners

    @cached_property
    def edges(self) -> list[list[Edge]]:
        """The blocks of each dim, in order."""
        return [sorted({block[dim] for block in self.owners}) for dim in range(self.layout.ndim)]

    @property
    def leads(self) -> list[tuple[Edge, ...]]:
        """Blocks of the dims in front of the last two."""
        return list(product(*self.edges[:-2]))

    def held(self, lead: tuple[Edge, ...], row: Edge | None, column: Edge) -> list[int]:
        return self.owners[(*lead, row, column) if row else (*lead, column)]

    @property
    def note(self) -> str:
        shard = "x".join(map(str, self.layout.shard_shape(self.shape)))
        partial = f", a partial sum over {' '.join(self.partial)}" if self.partial else ""
        return f"every rank holds {shard}{partial}"

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "step": self.step,
            "layout": str(self.layout).strip("'"),
            "partial_over": list(self.partial),
            "shape": list(self.shape),
            "shard_shape": list(self.layout.shard_shape(self.shape)),
            "blocks": [{"slices": [list(s) for s in block], "ranks": ranks} for block, ranks in self.owners.items()],
        }


def colour_of(ranks: Sequence[int], num_ranks: int) -> str:
    """A pale colour for the lowest of the ranks that hold a block."""
    # The golden ratio keeps neighbours apart whatever the number of ranks.
    hue = ranks[0] / num_ranks if num_ranks <= 12 else ranks[0] * 0.618034 % 1
    red, green, blue = colorsys.hls_to_rgb(hue, 0.8, 0.75)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def label_of(ranks: Sequence[int], longest: int = 14) -> str:
    text = ranges(ranks)
    return text if len(text) <= longest else f"{len(ranks)} ranks"


def plan_panels(plan: MatMulPlan, shape: Sequence[int], phase: str = "forward") -> list[list[Panel]]:
    """A row of panels for each tensor that a phase moves: as it is stored, through each step, to where it ends.

    Raises:
        LayoutError: sizes that the layouts do not divide.
    """
    sizes = plan.sizes(shape)
    moving = {move.tensor for move in plan.moves() if move.phase == phase}
    rows = []
    for name in {"forward": ("A", "B", "C"), "dgrad": ("dC", "B", "dA"), "wgrad": ("dC", "A", "dB")}[phase]:
        # Backward finds operands as forward left them, and wgrad finds dC as dgrad did, unless they are gathered again.
        kept, journey, tensor = name not in moving, plan.journeys[name], plan.stored[name.removeprefix("d")]
        is_result = name in ("C", "dA", "dB")
        begin = "as multiplied" if is_result else "as kept" if kept else "as stored"
        start = tensor.layout.with_dims(*(journey.end if kept else journey.begin))
        letters = [shown(letter) for letter in tensor.letters]
        steps, partial = () if kept else plan.relayouts[name], plan.grid.nontrivial(journey.partial)
        rows.append(_stages(name, begin, start, steps, partial, tensor.shape(sizes), letters))
    return rows


def _stages(
    name: str,
    begin: str,
    layout: Layout,
    steps: Sequence[Step],
    partial: tuple[str, ...],
    shape: tuple[int, ...],
    letters: Sequence[str],
) -> list[Panel]:
    panels = [Panel(f"{name}[{layout.label(letters)}] {begin}", layout, shape, partial)]
    dims = [list(layout.grid.nontrivial(axes)) for axes in layout.dims]
    for step in steps:
        gathered = {"all_gather": step.dim, "all_to_all": step.source}.get(step.kind)
        if gathered is not None:
            dims[gathered].pop()
        if step.kind in ("slice", "reduce_scatter", "all_to_all") and step.dim is not None:
            dims[step.dim] += step.axes
        partial = tuple(axis for axis in partial if axis not in step.axes)
        now = layout.with_dims(*dims)
        text = str(step).format(name)
        panels.append(Panel(f"{text}: {name}[{now.label(letters)}]", now, shape, partial, text))
    return panels
