"""Metrics of an evaluation, by which every rank of a Trainer decides for itself: which model is best, when to stop."""

from __future__ import annotations

import json
import math
from collections.abc import MutableMapping
from numbers import Real
from typing import Any

from ndtp.collectives.cross_check import differing
from ndtp.errors import MismatchError
from ndtp.runtime.process_grid import ProcessGrid

OF_CLOCKS = ("_time", "_runtime", "_per_second")  # ends of names of what each rank measures for itself
NEAR = 1e-3


def agree_on_metrics(mesh: ProcessGrid, metrics: MutableMapping[Any, Any]) -> None:
    """Compare the metrics of all ranks; those that differ by rounding become rank 0's.  One small all-gather.

    Raises:
        MismatchError: ranks have others, on every rank.
    """
    if mesh.check is False:
        return
    compared = {str(name): name for name, x in metrics.items() if isinstance(x, Real)}
    own = {key: float(metrics[name]) for key, name in compared.items() if not key.endswith(OF_CLOCKS)}
    by_rank = differing(mesh.groups, json.dumps(own, sort_keys=True))
    told = {rank: json.loads(text) for rank, text in (by_rank or {}).items()}
    for name in sorted({name for each in told.values() for name in each}):
        first, *others = ((rank, each.get(name, math.nan)) for rank, each in told.items())
        other = next((x for x in others if not _is_near(first[1], x[1])), None)
        if other is not None:
            raise MismatchError(
                f"Trainer: ranks have other metrics of one evaluation: {name} is {first[1]:.6g} on rank {first[0]} and "
                f"{other[1]:.6g} on rank {other[0]}, and each would take another model for the best\n"
                "  fix: compute_metrics that gives the same on every rank, which has all rows; it draws from one seed"
            )
    metrics.update({compared[key]: x for key, x in told.get(0, {}).items() if x != own[key]})


def _is_near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=NEAR, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))
