"""Traffic: the bytes that a plan makes each rank receive, exactly, and the lower bound of any algorithm.  Pure.

Every prediction of ndtp is made of `traffic`: a plan's volume, a module's (a run of it on a grid that sends nothing)
and the planner's, for which sizes of axes may be arrays, one entry a grid.  `CommMeter` counts on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from ndtp.algebra import html
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import subscript
from ndtp.algebra.steps import SHORT, Step, apply
from ndtp.algebra.wire import Format, step_bytes
from ndtp.dtypes import Dtype, name_of, size_of


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank receives of one tensor by one kind of collective over one set of axes in one phase.

    Two entries are equal where the same bytes come by the same collective: which tensor they belong to is a remark.

    Attributes:
        num_bytes: as they travel, scales included.
        elements: how many numbers these bytes are.
        tensor: the product or module and the name in it, such as "mlp.up A".
        dtype: the dtype that travels, such as "bfloat16" or "fp8_e4m3".
        calls: how many collectives; a schedule may cut one into chunks.
    """

    phase: str
    collective: str
    axes: tuple[str, ...]
    num_bytes: int
    elements: int = field(default=0, compare=False)
    tensor: str = field(default="", compare=False)
    dtype: str = field(default="", compare=False)
    calls: int = field(default=1, compare=False)

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        return self.phase, self.collective, self.axes

    def __str__(self) -> str:
        return f"{self.phase} {SHORT.get(self.collective, self.collective)}[{subscript(self.axes)}]"


@dataclass(frozen=True, eq=False)
class Volume:
    """The traffic of a plan, a model or a measured program, in bytes received per rank.

    Volumes add.  Iterating yields one entry for each phase, collective and axes, and `==` compares these; `entries`
    tells tensors and dtypes apart as well.
    """

    entries: tuple[Traffic, ...] = ()

    @classmethod
    def of(cls, traffic: Iterable[Traffic]) -> Volume:
        """Entries that differ in no name are merged and sorted; those that move nothing are left out."""
        return cls(tuple(_merged(traffic, lambda entry: (*entry.key, entry.tensor, entry.dtype))))

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def elements(self) -> int:
        """The count of numbers that these bytes are."""
        return sum(entry.elements for entry in self.entries)

    def by(self, attribute: str, count: str = "num_bytes") -> dict[str, int]:
        """Totals per "phase", "collective", "axes" (named as `zy`), "tensor" or "dtype".

        Args:
            count: "num_bytes", "elements" or "calls".
        """
        totals: dict[str, int] = {}
        for entry in self.entries:
            value = getattr(entry, attribute)
            key = value if isinstance(value, str) else subscript(value)
            totals[key] = totals.get(key, 0) + getattr(entry, count)
        return totals

    @property
    def forward(self) -> int:
        return self.by("phase").get("forward", 0)

    @property
    def backward(self) -> int:
        return self.total - self.forward

    def __add__(self, other: Volume) -> Volume:
        return Volume.of((*self.entries, *other.entries))

    def __iter__(self) -> Iterator[Traffic]:
        return _merged(self.entries, lambda entry: entry.key)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Volume) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _repr_html_(self) -> str:
        rows = [(each.phase, each.collective, " ".join(each.axes), f"{each.num_bytes:,}") for each in self]
        return html.table(("phase", "collective", "axes", "bytes per rank"), rows, f"{self.total:,} bytes in all")

    def __str__(self) -> str:
        return ", ".join(f"{entry} {entry.num_bytes:,}" for entry in self) or "no communication"


def _merged(traffic: Iterable[Traffic], key: Any) -> Iterator[Traffic]:
    """Entries of one key as one each, sorted; names in which they differ are left out."""
    for _, group in groupby(sorted(traffic, key=key), key):
        first, *others = group
        for other in others:
            first = replace(
                first,
                num_bytes=first.num_bytes + other.num_bytes,
                elements=first.elements + other.elements,
                calls=first.calls + other.calls,
                tensor=first.tensor if first.tensor == other.tensor else "",
                dtype=first.dtype if first.dtype == other.dtype else "",
            )
        if first.num_bytes:
            yield first


def traffic(
    grid: Grid,
    steps: Sequence[Step],
    shape: Sequence[int],
    phase: str,
    tensor: str = "",
    dtype: Dtype = "float32",
    form: Format | None = None,
) -> Iterator[Traffic]:
    """The traffic of a relayout that starts from a local tensor of `shape`.

    Args:
        dtype: in which the tensor is computed.
        form: in which it travels where that takes fewer bytes.
    """
    itemsize, own = size_of(dtype), name_of(dtype)
    for step, after, elements in apply(grid, steps, shape):
        if step.kind != "slice":
            num_bytes, saves = step_bytes(grid, step, shape, elements, itemsize, form)
            sent = own if form is None or saves is False else form.name
            yield Traffic(phase, step.kind, step.axes, num_bytes, elements, tensor, sent)
        shape = after


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
