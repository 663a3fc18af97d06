"""Measure candidates on a device and remember the best in the user's cache.

Run it once, on one rank, before training; every rank then reads the same file (compare `Table.fingerprint`).  Numbers
are checked before anything is timed, and candidates are timed in turns, so that a clock that drifts hurts all alike.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ndtp_kernels.choice import roof
from ndtp_kernels.choice.chips import Chip, detect
from ndtp_kernels.choice.problem import TORCH, Config, Problem
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.choice.table import Table, candidates, default_table, shipped_table, user_cache
from ndtp_kernels.errors import KernelError, fallbacks_raise
from ndtp_kernels.tools.workloads import Workload, workload

# Seconds of each configuration; None: it failed, or its numbers were wrong.
Measure = Callable[[Workload, Sequence[Config]], dict[Config, float | None]]
SHORTLIST = 12
logger = logging.getLogger(__name__)


def tolerance(dtype: str) -> float:
    """Largest error relative to the largest value: a few roundings of the result."""
    return {"float32": 1e-3, "float16": 4e-3, "bfloat16": 2e-2}[dtype]


def options_for(config: Config) -> Options:
    return Options(backend="torch") if config.kernel == "torch" else Options(backend="triton", config=config)


def time_in_turns(runs: Sequence[Callable[[], object]], rounds: int = 15, warmup: int = 3) -> list[list[float]]:
    """Seconds of each run in every round, measured one after the other by CUDA events."""
    for run in runs:
        for _ in range(warmup):
            run()
    # Larger than L2: each run finds it cold, as it would between other layers.
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    events = [[(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(rounds)] for _ in runs]
    for number in range(rounds):
        for run, pairs in zip(runs, events, strict=True):
            flush.zero_()
            start, end = pairs[number]
            start.record()
            run()
            end.record()
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) / 1e3 for start, end in pairs] for pairs in events]


def right_ones(work: Workload, configs: Sequence[Config]) -> list[Config]:
    """The configurations that run, as kernels, and whose numbers are right; the others are logged."""
    good = []
    want = work.expected()
    for config in configs:
        try:
            work.reset()
            with fallbacks_raise():
                error = work.error(work.ours(options_for(config)), want)
        except Exception as problem:  # one that does not compile or launch here is no candidate, and is named
            logger.warning("%s is no candidate here: %s", config, (str(problem).splitlines() or [""])[0])
            continue
        if error <= tolerance(work.problem.dtype):
            good.append(config)
        else:
            logger.warning("%s is no candidate here: wrong numbers, relative error %.3g", config, error)
    return good


def measure_on_device(work: Workload, configs: Sequence[Config]) -> dict[Config, float | None]:
    """Median seconds of each configuration whose numbers are right."""
    result: dict[Config, float | None] = dict.fromkeys(configs)
    good = right_ones(work, configs)
    runs = [lambda config=config: work.ours(options_for(config)) for config in good]  # type: ignore[misc]
    for config, seconds in zip(good, time_in_turns(runs), strict=True):
        result[config] = statistics.median(seconds)
    return result


def tune(
    shapes: Sequence[tuple[int, int, int]],
    dtype: str = "bfloat16",
    kinds: Sequence[str] = ("plain", "epilogue", "backward", "wgrad"),
    *,
    layouts: Sequence[str] = ("nt", "nn", "tn"),
    path: Path | None = None,
    chip: Chip | None = None,
    device: torch.device | None = None,
    measure: Measure = measure_on_device,
) -> dict[str, Any]:
    """Measure each (M, N, K) in each kind (plain ones in each layout), and write the winners to the user's cache.

    returns  {"path", "chip", "fingerprint", "rows": [{shape_class, choice, seconds, tflops, against_torch, heuristic}]}

    Raises:
        KernelError: no GPU to measure on.
    """
    device = device or torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if chip is None and not torch.cuda.is_available():
        raise KernelError("tune", "there is no GPU to measure on", "run it where the training will run")
    chip = chip or detect(device)
    if chip is None:
        raise KernelError("tune", f"{device} is not a GPU", "a cuda device")
    path = path or user_cache()
    table = default_table()
    entries: dict[str, Config] = {}
    rows = []
    for m, n, k in shapes:
        for kind in kinds:
            for layout in layouts if kind == "plain" else ("nt",):
                work = workload(kind, m, n, k, dtype=getattr(torch, dtype), device=device, layout=layout)
                row, best = _tune_one(work, chip, table, measure)
                rows.append(row)
                if best is not None:
                    entries[work.problem.shape_class] = best
    stored = Table.from_json(path.read_text()) if path.exists() else Table()
    stored = stored.with_tuned({chip.name: {dtype: entries}})
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one step: a rank that starts now reads the old file or the new one, never half of it.
    partial = path.with_suffix(".partial")
    partial.write_text(stored.to_json() + "\n")
    partial.replace(path)
    default_table.cache_clear()
    fingerprint = shipped_table().with_tuned(stored.tuned).fingerprint()
    return {"path": str(path), "chip": chip.name, "fingerprint": fingerprint, "rows": rows}


def _tune_one(work: Workload, chip: Chip, table: Table, measure: Measure) -> tuple[dict[str, Any], Config | None]:
    """The winner among the candidates that the model ranks highest, torch always among them."""
    problem: Problem = work.problem
    ranked = sorted(candidates(problem, chip, table), key=lambda c: roof.estimate(problem, c, chip).seconds)
    shortlist = ranked[:SHORTLIST] + [c for c in ranked[SHORTLIST:] if c == TORCH]
    measured = {config: s for config, s in measure(work, shortlist).items() if s is not None}
    row: dict[str, Any] = {"shape_class": problem.shape_class, "heuristic": str(ranked[0])}
    if not measured:
        return {**row, "choice": None}, None
    best = min(measured, key=lambda config: measured[config])
    by_torch = next((s for c, s in measured.items() if c.kernel == "torch"), None)
    seconds = measured[best]
    return {
        **row,
        "choice": str(best),
        "seconds": seconds,
        "tflops": work.flops / seconds / 1e12,
        "against_torch": None if by_torch is None else by_torch / seconds,
    }, best
