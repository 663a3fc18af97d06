"""Volumes: the elements that a plan makes each rank receive, exactly, and the lower bound of any algorithm. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ndtp.algebra import html
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import subscript
from ndtp.algebra.steps import SHORT, Step, apply


@dataclass(frozen=True)
class Traffic:
    """The elements or bytes that a rank receives by one kind of collective over one set of axes in one phase."""

    phase: str
    collective: str
    axes: tuple[str, ...]
    amount: int
    calls: int = field(default=1, compare=False)  # a schedule may cut a collective into chunks

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        return self.phase, self.collective, self.axes

    def __str__(self) -> str:
        return f"{self.phase} {SHORT.get(self.collective, self.collective)}[{subscript(self.axes)}]"


@dataclass(frozen=True)
class Volume:
    """Traffic of a plan, a model or a measured program.  Volumes add; `==` compares entry by entry.

    Amounts are elements received per rank where a plan predicts them, bytes after `in_bytes` or from a `CommMeter`.
    """

    entries: tuple[Traffic, ...] = ()

    @classmethod
    def of(cls, traffic: Iterable[Traffic]) -> Volume:
        """Entries of one phase, collective and axes are merged and sorted; those that move nothing are left out."""
        merged: dict[tuple[str, str, tuple[str, ...]], tuple[int, int]] = {}
        for entry in traffic:
            amount, calls = merged.get(entry.key, (0, 0))
            merged[entry.key] = amount + entry.amount, calls + entry.calls
        return cls(tuple(Traffic(*key, *totals) for key, totals in sorted(merged.items()) if totals[0]))

    @property
    def total(self) -> int:
        return sum(entry.amount for entry in self.entries)

    def by(self, attribute: str) -> dict[str, int]:
        """Totals per "phase", "collective" or "axes" (named as `zy`)."""
        totals: dict[str, int] = {}
        for entry in self.entries:
            value = getattr(entry, attribute)
            key = value if isinstance(value, str) else subscript(value)
            totals[key] = totals.get(key, 0) + entry.amount
        return totals

    @property
    def forward(self) -> int:
        return self.by("phase").get("forward", 0)

    @property
    def backward(self) -> int:
        return self.total - self.forward

    def in_bytes(self, itemsize: int) -> Volume:
        """Return the volume in bytes, for elements of `itemsize` bytes."""
        return Volume(tuple(Traffic(e.phase, e.collective, e.axes, e.amount * itemsize, e.calls) for e in self.entries))

    def __add__(self, other: Volume) -> Volume:
        return Volume.of((*self.entries, *other.entries))

    def __iter__(self) -> Iterator[Traffic]:
        return iter(self.entries)

    def _repr_html_(self) -> str:
        rows = [(each.phase, each.collective, " ".join(each.axes), f"{each.amount:,}") for each in self.entries]
        return html.table(("phase", "collective", "axes", "received per rank"), rows, f"{self.total:,} in all")

    def __str__(self) -> str:
        return ", ".join(f"{entry} {entry.amount:,}" for entry in self.entries) or "no communication"


def traffic(grid: Grid, steps: Sequence[Step], shape: Sequence[int], phase: str) -> Iterator[Traffic]:
    """The traffic of a relayout that starts from a local tensor of `shape`."""
    for step, _, amount in apply(grid, steps, shape):
        if step.kind != "slice":
            yield Traffic(phase, step.kind, step.axes, amount)


def lower_bound(m: float, n: float, k: float, ranks: float) -> float:
    """Words that some rank must receive to multiply [m, k] by [k, n] on `ranks` ranks, one copy of each operand.

    Source: Al Daas, Ballard, Grigori, Kumar and Rouse, "Tight memory-independent parallel matrix multiplication
    communication lower bounds", SPAA 2022.
    """
    small, middle, large = sorted((m, n, k))
    owned = (large * middle + large * small + middle * small) / ranks
    if ranks <= large / middle:
        data = (large * middle + large * small) / ranks + middle * small
    elif ranks <= large * middle / small**2:
        data = 2 * math.sqrt(large * middle * small**2 / ranks) + large * middle / ranks
    else:
        data = 3 * (large * middle * small / ranks) ** (2 / 3)
    return data - owned
