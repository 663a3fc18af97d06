"""What the planner says when a request cannot be met: the constraint, and the nearest values that would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ndtp import block_cost
from ndtp.block_cost import AXES, Grids
from ndtp.errors import GridError

if TYPE_CHECKING:
    from ndtp.planner import Request


def check_request(request: Request) -> None:
    """
    Raises:
        GridError: a size below 1, or a word that is not one of those known.
    """
    from ndtp.planner import OBJECTIVES

    first = request.blocks[-1]
    sizes = {"tokens": first.tokens, "hidden": first.hidden, "ffn": first.inner, "ranks": request.ranks}
    sizes |= {"layers": request.layers, "chunks": request.chunks}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise GridError(f"plan: {name}={size!r}; it must be an integer of at least 1")
    for name, value, known in (
        ("objective", request.objective, OBJECTIVES),
        ("dtype", request.dtype, tuple(block_cost_dtypes())),
        ("optimizer", request.optimizer, tuple(block_cost.OPTIMIZERS)),
    ):
        if value not in known:
            raise GridError(f"plan: {name}={value!r} is not one of {', '.join(known)}")
    if request.memory_limit_gib is not None and not request.memory_limit_gib > 0:
        raise GridError(f"plan: memory_limit_gib={request.memory_limit_gib} must be above 0")
    for axis, size in request.fixed.items():
        if axis not in AXES:
            raise GridError(f"plan: axis {axis!r} cannot be fixed; the axes are {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise GridError(f"plan: fixed {axis}={size!r}; a size is an integer of at least 1")
    request.hardware.flops_per_second(request.dtype)


def block_cost_dtypes() -> dict[str, int]:
    from ndtp.hardware import DTYPES

    return DTYPES


def explain_none(request: Request, constraint: str, least: float = 0.0) -> str:
    """Why no grid is left, and what to change."""
    ranks = request.ranks
    if constraint == "fixed":
        given = " ".join(f"{axis}={size}" for axis, size in request.fixed.items())
        product = int(np.prod(list(request.fixed.values())))
        near = nearest(ranks, lambda n: n % product == 0 and (len(request.fixed) < 4 or n == product))
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        return (
            f"plan: no grid of {ranks} ranks has {given}\n"
            f"  fix: sizes whose product divides {ranks} (of {_short(divisors)}), or {_or(near)} ranks"
        )
    if constraint == "sizes":
        near = nearest(ranks, lambda n: _fits(request, n))
        heads = [size for block in request.blocks for size in block.heads]
        lines = [f"plan: no grid of {ranks} ranks divides {_sizes(request)}"]
        lines.append(f"  fix: {_or(near)} ranks" if near else "  no number of ranks nearby does")
        if not request.pad:
            block = request.blocks[-1]
            for name, size in (("tokens", block.tokens), ("hidden", block.hidden), ("ffn", block.inner)):
                around = sorted({size // ranks * ranks, -(-size // ranks) * ranks} - {0})
                lines.append(f"       or {name} {_or(around)}")
            lines.append("       or pad sizes (pad=True; without --no-pad)")
        elif heads and request.fixed:
            lines.append(f"       y must divide the numbers of heads, {', '.join(map(str, sorted(set(heads))))}")
        return "\n".join(lines)
    if constraint == "memory":
        return (
            f"plan: no grid of {ranks} ranks fits into {request.memory_limit_gib:g} GiB a rank, even with operands "
            f"gathered again\n  fix: the least that any needs is {least / 2**30:.2f} GiB; more ranks, fewer tokens a "
            "step, or an optimizer with less state"
        )
    return (
        f"plan: no grid of {ranks} ranks keeps x and y inside a node of {request.hardware.ranks_per_node}\n"
        f"  fix: x * y that divides {request.hardware.ranks_per_node}, or without that constraint"
    )


def _fits(request: Request, ranks: int) -> bool:
    g = Grids.all(ranks)
    keep = np.ones(g.ranks.shape, dtype=bool)
    for axis, size in request.fixed.items():
        keep &= getattr(g, axis) == size
    for block in request.blocks:
        keep &= block_cost.divides(block, g, request.pad)
    return bool(keep.any())


def nearest(value: int, valid: object, reach: int = 4096) -> list[int]:
    """The nearest valid numbers below and above."""
    found = []
    for candidates in (range(value - 1, max(0, value - reach), -1), range(value + 1, value + reach)):
        found += [next((n for n in candidates if valid(n)), 0)]  # type: ignore[operator]
    return [n for n in found if n]


def _sizes(request: Request) -> str:
    block = request.blocks[-1]
    return f"tokens={block.tokens}, hidden={block.hidden}, ffn={block.inner}"


def _or(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _short(values: list[int]) -> str:
    shown = values if len(values) <= 9 else [*values[:4], "...", *values[-4:]]
    return "{" + ", ".join(map(str, shown)) + "}"
