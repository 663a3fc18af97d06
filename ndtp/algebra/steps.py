"""The table of steps that take a tensor from how it is held to how it is stored.

Per axis: partial -> split: reduce-scatter; partial -> replicated: all-reduce; split -> replicated: all-gather;
replicated -> split: slice; split -> another dim: all-to-all.  Two more moves change whose shard it is and no layout:
a rank passes its shard on to the next one along axes, or swaps it with the one that is as far from the other end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ndtp.algebra.grid import Grid

Dims = tuple[tuple[str, ...], ...]

SHORT = {
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_reduce": "AR",
    "all_to_all": "A2A",
    "slice": "slice",
    "pass_on": "PASS",
    "swap_ends": "SWAP",
}


@dataclass(frozen=True)
class Step:
    """One move of a relayout: a collective over the ranks along `axes`, or a local slice.

    `dim` is the dim that grows by a gather, or shrinks by a scatter or slice; an all-reduce has none.  An all-to-all
    gathers `source` and scatters `dim`.  A point-to-point move ("pass_on", "swap_ends") has no dim: rank i of those
    along `axes` sends its shard to rank i + 1, the last one to the first; or to rank p - 1 - i.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int | None = None
    source: int | None = None

    def __str__(self) -> str:
        return f"{SHORT[self.kind]} {{}} over {' '.join(self.axes)}"


@dataclass(frozen=True)
class Journey:
    """The dims of one tensor of a plan before its steps, and after them.

    Attributes:
        letters: of its dims; None for a dim of size 1 that is broadcast.
        begin, end: for each dim the axes that split it.
        partial: axes over which it begins as an unreduced sum.
    """

    letters: tuple[str | None, ...]
    begin: Dims
    end: Dims
    partial: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanMove:
    """A tensor of a plan, the phase that moves it, and by which steps, if any."""

    phase: str
    tensor: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class PlanStep:
    """A step of a plan, with the phase that runs it and the tensor that it moves."""

    phase: str
    tensor: str
    step: Step

    def __str__(self) -> str:
        return str(self.step).format(self.tensor)


def phase_of(tensor: str, backward: bool = False, dgrad: bool = True) -> str:
    """The phase that moves a tensor: "forward", "dgrad" or "wgrad".

    dC serves both products of backward and moves once, in the first of them, which is dgrad if that is wanted.  An
    operand that backward gathers again moves where it is multiplied: B in dgrad, A in wgrad.
    """
    if not backward:
        return "forward"
    if tensor == "dC":
        return "dgrad" if dgrad else "wgrad"
    return "dgrad" if tensor in ("B", "dA") else "wgrad"


def is_legal(grid: Grid, one: Dims, other: Dims) -> bool:
    """Return whether a relayout leads from one layout to the other.

    In every dim the shared axes must lead in both layouts, in the same order.
    """
    return all(_shared_lead(grid.nontrivial(s), grid.nontrivial(t)) for s, t in zip(one, other, strict=True))


def _shared_lead(s: tuple[str, ...], t: tuple[str, ...]) -> bool:
    shared = [axis for axis in s if axis in t]
    return list(s[: len(shared)]) == shared == list(t[: len(shared)])


def relayout_steps(grid: Grid, held: Dims, stored: Dims, partial: Iterable[str] = ()) -> tuple[Step, ...]:
    """The steps from `held`, an unreduced sum over the axes `partial`, to `stored`.

    What makes the tensor smaller comes first (slices, reduce-scatters major axis first), what makes it larger last
    (all-gathers, minor axis first); axes of one rank need no step.  `is_legal(held, stored)` must hold.
    """
    now = [list(grid.nontrivial(axes)) for axes in held]
    goal = [list(grid.nontrivial(axes)) for axes in stored]
    place = {axis: dim for dim, axes in enumerate(goal) for axis in axes}
    partial = set(partial)
    pending = [axis for axis in grid.nontrivial(grid.names) if axis in partial]  # one order, so one process group
    steps: list[Step] = []
    while now != goal or pending:
        arriving = {g[len(n)]: d for d, (n, g) in enumerate(zip(now, goal, strict=True)) if g[: len(n)] == n != g}
        leaving = {n[-1]: d for d, (n, g) in enumerate(zip(now, goal, strict=True)) if g[: len(n)] != n}
        split = {axis for axes in now for axis in axes}
        sliced = [axis for axis in arriving if axis not in split and axis not in pending]
        scattered = [axis for axis in arriving if axis in pending]
        moved = [axis for axis in leaving if axis in arriving]
        if sliced:
            step = Step("slice", (sliced[0],), arriving[sliced[0]])
        elif scattered:
            step = Step("reduce_scatter", (scattered[0],), arriving[scattered[0]])
        elif moved:
            step = Step("all_to_all", (moved[0],), arriving[moved[0]], leaving[moved[0]])
        elif pending and not any(axis in place for axis in pending):
            step = Step("all_reduce", tuple(pending))
        else:
            # An axis that has to arrive elsewhere but finds its way blocked is gathered as well, and sliced later.
            axis = min(leaving, key=lambda axis: axis in place)
            step = Step("all_gather", (axis,), leaving[axis])
        for dim in (leaving[step.axes[0]],) if step.kind in ("all_to_all", "all_gather") else ():
            now[dim].pop()
        if step.kind in ("slice", "reduce_scatter", "all_to_all") and step.dim is not None:
            now[step.dim].append(step.axes[0])
        pending = [axis for axis in pending if axis not in step.axes]
        steps.append(step)
    return tuple(steps)


POINT_TO_POINT = ("pass_on", "swap_ends")


def target_of(kind: str, rank: int, ranks: int) -> int:
    """Return the rank to which one of `ranks` sends in a point-to-point move."""
    return (rank + 1) % ranks if kind == "pass_on" else ranks - 1 - rank


def received(kind: str, elements: int, ranks: int) -> int:
    """Elements that each rank receives in a collective over `ranks` ranks, by ring or pairwise exchange.

    `elements` is the size of the larger side: the gathered result, or the input of a reduction or an all-to-all.  An
    all-reduce is a reduce-scatter and an all-gather; where `ranks` does not divide `elements` its blocks round up.
    In a point-to-point move it is the shard.
    """
    if kind in POINT_TO_POINT:
        return elements if ranks > 1 else 0
    if kind == "slice":
        return 0
    if kind == "all_reduce":
        return 2 * (ranks - 1) * -(-elements // ranks)
    return elements // ranks * (ranks - 1)


def apply(grid: Grid, steps: Sequence[Step], shape: Sequence[int]) -> Iterator[tuple[Step, tuple[int, ...], int]]:
    """Follow a local shape through `steps`: yields each step, the shape after it and the elements received."""
    local = list(shape)
    for step in steps:
        ranks, before = grid.size(step.axes), prod(local)
        if step.kind == "all_gather" and step.dim is not None:
            local[step.dim] *= ranks
        elif step.kind == "all_to_all" and step.source is not None:
            local[step.source] *= ranks
        if step.kind in ("slice", "reduce_scatter", "all_to_all") and step.dim is not None:
            local[step.dim] //= ranks
        larger = prod(local) if step.kind == "all_gather" else before
        yield step, tuple(local), received(step.kind, larger, ranks)
