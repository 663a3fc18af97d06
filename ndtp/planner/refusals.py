"""The planner's refusals: the constraint that a request cannot meet, and the nearest values that would meet it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ndtp.algebra.grid import divisors
from ndtp.planner import block_cost
from ndtp.planner.block_cost import Grids
from ndtp.planner.hardware import MAX_RANKS
from ndtp.planner.request import Request


def explain_none(request: Request, constraint: str, least: float = 0.0) -> str:
    """Return the reason why no grid is left, and what to change."""
    ranks = request.ranks
    if constraint == "fixed":
        given = " ".join(f"{axis}={size}" for axis, size in request.fixed.items())
        product = math.prod(request.fixed.values())
        near = nearest(ranks, lambda n: n % product == 0 and (len(request.fixed) < len(request.axes) or n == product))
        return (
            f"plan: no grid of {ranks} ranks has {given}\n"
            f"  fix: sizes whose product divides {ranks} (of {_short(divisors(ranks))})"
            + (f", or {_or(near)} ranks" if near else "")
        )
    if constraint == "sizes":
        near = nearest(ranks, lambda n: _fits(request, n))
        heads = [size for block in request.blocks for size in block.heads]
        lines = [f"plan: no grid of {ranks} ranks divides {_sizes(request)}"]
        lines.append(f"  fix: {_or(near)} ranks" if near else "  no number of ranks nearby does")
        if not request.pad:
            block = request.main
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
    # Thousands of numbers are tried, and few of them divide what they would have to.
    if ranks % math.prod(request.fixed.values()):
        return False
    if any(block.experts and block.experts % request.fixed.get("e", 1) for block in request.blocks):
        return False
    if not request.pad and any(block.tokens * block.hidden * block.inner % ranks for block in request.blocks):
        return False
    g = Grids.all(ranks, request.has_experts)
    keep = np.ones(g.ranks.shape, dtype=bool)
    for axis, size in request.fixed.items():
        keep &= getattr(g, axis) == size
    for block in request.blocks:
        keep &= block_cost.divides(block, g, request.pad)
    return bool(keep.any())


def nearest(value: int, valid: Callable[[int], bool], reach: int = 4096) -> list[int]:
    """The nearest valid numbers below and above."""
    sides = range(value - 1, max(0, value - reach), -1), range(value + 1, min(value + reach, MAX_RANKS + 1))
    return [n for side in sides if (n := next(filter(valid, side), 0))]


def _sizes(request: Request) -> str:
    block = request.main
    experts = [f"{block.experts} experts" for block in request.blocks if block.experts]
    if experts:
        return f"{experts[0]} as asked, with tokens={block.tokens}, hidden={block.hidden}, ffn={block.inner}"
    return f"tokens={block.tokens}, hidden={block.hidden}, ffn={block.inner}"


def _or(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _short(values: list[int]) -> str:
    shown = values if len(values) <= 9 else [*values[:4], "...", *values[-4:]]
    return "{" + ", ".join(map(str, shown)) + "}"
