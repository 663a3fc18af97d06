"""The scaling of 1D, 2D, 3D and the best grid with the number of ranks, which `ndtp plan --plot` draws. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ndtp.errors import GridError
from ndtp.planner.block_cost import Grids
from ndtp.planner.request import Request
from ndtp.planner.search import candidates
from ndtp.planner.time_model import gemm_seconds

SERIES = ("1D", "2D", "3D", "best")


@dataclass(frozen=True)
class ScalingPoint:
    """The least volume and the least time of a family of grids on a number of ranks (not of one grid)."""

    ranks: int
    volume_bytes: float
    step_ms: float


@dataclass(frozen=True)
class Scaling:
    """Points per family; `bound` holds the lower bound and the time of the products alone, divided evenly."""

    families: dict[str, list[ScalingPoint]]
    bound: list[ScalingPoint]


def rank_counts(ranks: int) -> list[int]:
    """Powers of two up to `ranks`, and `ranks` itself."""
    return sorted({2**n for n in range(ranks.bit_length()) if 2**n <= ranks} | {ranks})


def scaling(request: Request, counts: Sequence[int]) -> Scaling:
    """Constraints hold for each count; a family that they leave no grid of has no point there."""
    families: dict[str, list[ScalingPoint]] = {name: [] for name in SERIES}
    bound = []
    for count in counts:
        each = replace(request, ranks=count)
        bound.append(ScalingPoint(count, each.bound, _products_ms(each)))
        try:
            found = candidates(each)
        except GridError:
            continue
        for name in SERIES:
            mask = _family(name, found.g)
            if mask.any():
                time = float(found.time.total[mask].min()) * 1e3
                families[name].append(ScalingPoint(count, float(found.volume[mask].min()), time))
    return Scaling(families, bound)


def _family(name: str, g: Grids) -> Any:
    tensor = (g.dp == 1) & (g.e == 1) & (g.x * g.y > 1)
    split = (g.x > 1) & (g.y > 1)
    return {
        "1D": tensor & (g.z == 1) & ~split,
        "2D": tensor & (g.z == 1) & split,
        "3D": tensor & (g.z > 1) & split,
        "best": np.ones(g.ranks.shape, dtype=bool),
    }[name]


def _products_ms(request: Request) -> float:
    """Forward, dgrad and wgrad of the whole products at the large products' rate, over the number of ranks."""
    seconds = 0.0
    for block in request.blocks:
        for m, k, n in block.bounds:
            seconds += block.times * 3 * float(gemm_seconds(request.hardware, m, n, k, request.dtype)) / request.ranks
    return seconds * request.layers * 1e3
