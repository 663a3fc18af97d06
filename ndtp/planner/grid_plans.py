"""`GridPlans`: the list that `ndtp.plan` returns, best first; it reads as a table in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex, overload

from ndtp.algebra import html
from ndtp.planner.fields import in_digits
from ndtp.planner.grid_plan import GridPlan
from ndtp.planner.request import GIB, MIB

SHOWN = 20  # plans of a list that is printed; a thousand ranks have hundreds
COLUMNS = ("#", "grid, slowest axis first", "kind", "MiB/step", "x bound", "ms/step", "waiting", "GiB")
WORDS = 3  # of the columns; the others are numbers


class GridPlans(list[GridPlan]):
    """The plans of one request, best first."""

    @overload
    def __getitem__(self, at: SupportsIndex) -> GridPlan: ...
    @overload
    def __getitem__(self, at: slice) -> GridPlans: ...
    def __getitem__(self, at: SupportsIndex | slice) -> GridPlan | GridPlans:
        return GridPlans(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)

    @property
    def title(self) -> str:
        """The number of the plans, and what they were asked for."""
        request = self[0].request
        grids = "1 grid" if len(self) == 1 else f"{len(self)} grids"
        ranks = "1 rank" if request.ranks == 1 else f"{request.ranks} ranks"
        return f"{grids} of {ranks} by {request.objective}, on {request.hardware.name}"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield what stands in the columns of each plan."""
        for i, each in enumerate(self, 1):
            mib = each.volume_bytes / MIB
            yield (
                str(i),
                each.grid_text,
                each.kind.replace("data parallel", "DP").replace("expert parallel", "EP"),
                f"{mib:,.0f}" if 1e4 <= mib < 1e9 else in_digits(mib, 4),
                in_digits(each.bound_ratio),
                in_digits(each.step_ms, 4),
                f"{each.exposed_ms / each.step_ms:.0%}",
                in_digits(each.memory_bytes / GIB),
            )

    def __repr__(self) -> str:
        if not self:
            return "[]"
        cells = [COLUMNS, *self[:SHOWN].rows()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        sides = [">", *"<" * (WORDS - 1), *">" * (len(COLUMNS) - WORDS)]
        line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
        lines = [line.format(*row) for row in cells]
        return "\n".join([self.title, *lines, *self._rest()])

    def _repr_html_(self) -> str:
        if not self:
            return html.lines("[]")
        shown, caption = self[:SHOWN], ", ".join([self.title, *self._rest()])
        rows = [(*row, plan.why) for row, plan in zip(shown.rows(), shown, strict=True)]
        return html.table((*COLUMNS, "why"), rows, caption)

    def _rest(self) -> list[str]:
        return [f"... and {len(self) - SHOWN} others"] * (len(self) > SHOWN)
