"""One product, several ways to compute it: checked, then timed in turns; and the time that a benchmark may take."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ndtp_kernels.choice import roof
from ndtp_kernels.choice.chips import Chip
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.choice.table import TORCH, Config, candidates, choose_for, default_table
from ndtp_kernels.tools.tuning import options_for, time_in_turns, tolerance
from ndtp_kernels.tools.workloads import Workload

RIVALS_PER_SHAPE = 3  # kernel configurations timed for one product: the model's favourites
# CUDA graphs would copy every operand into a buffer of their own at each call, and lose.
COMPILE_MODE = "max-autotune-no-cudagraphs"
OTHERS = ("torch", "compile", "persistent")  # labels of what is not ours

Run = Callable[[], Any]


@dataclasses.dataclass
class Deadline:
    """The parts of a benchmark share a time budget; what did not fit is listed, not left out in silence."""

    end: float
    start: float = dataclasses.field(default_factory=time.monotonic)
    skipped: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def part(self, share: float) -> Deadline:
        """The same clock and list, for a part that must end when `share` of the time is gone."""
        return dataclasses.replace(self, end=self.start + share * (self.end - self.start))

    @property
    def remaining(self) -> float:
        return self.end - time.monotonic()

    def passed(self, name: str) -> bool:
        if self.remaining <= 0:
            self.skipped.append(name)
            return True
        return False


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def failures(runs: Mapping[str, Any], error_of: Callable[[Any], float], limit: float) -> dict[str, str]:
    """{label: why} of the runs that fail or give wrong numbers: nothing is timed that was not checked."""
    failed = {}
    for label, run in runs.items():
        try:
            error = error_of(run)
            if not error <= limit:
                failed[label] = f"wrong numbers: relative error {error:.3g}, limit {limit:.3g}"
        except Exception as problem:  # one that does not compile, launch or fit is named, and the rest goes on
            failed[label] = reason(problem)
            torch.cuda.empty_cache()
    return failed


def rivals(work: Workload, chip: Chip) -> tuple[dict[str, Run], str | None]:
    """Eager torch, the model's favourite kernels and the library's own choice; and the label of that choice."""
    runs: dict[str, Run] = {"torch": work.eager}
    if not work.flops:
        runs["kernel"] = lambda: work.ours(Options(backend="triton"))
        return runs, "kernel"
    table = default_table()
    ranked = sorted(
        (c for c in candidates(work.problem, chip, table) if c != TORCH),
        key=lambda c: roof.estimate(work.problem, c, chip).seconds,
    )
    choice = choose_for(work.problem, chip, table)
    for config in dict.fromkeys((*ranked[:RIVALS_PER_SHAPE], choice)):
        if config != TORCH:
            runs[str(config)] = lambda config=config: work.ours(options_for(config))  # type: ignore[misc]
    return runs, str(choice)


def configurations(work: Workload, chip: Chip) -> dict[str, Config]:
    """Label -> configuration, for those that `rivals` times."""
    table = default_table()
    return {str(c): c for c in (*candidates(work.problem, chip, table), choose_for(work.problem, chip, table))}


def compete(
    name: str, work: Workload, chip: Chip, rounds: int, more: Mapping[str, Run] | None = None
) -> dict[str, Any]:
    """One product by everything that can compute it, and by `more`, as a row of the report.

    Raises:
        RuntimeError: torch or every kernel failed, so that there is nothing to compare.
    """
    runs, choice = rivals(work, chip)
    runs |= more or {}
    failed = checked(work, runs)
    timed = {label: run for label, run in runs.items() if label not in failed}
    if "torch" not in timed or not set(timed) - set(OTHERS):
        raise RuntimeError(f"nothing to compare: {failed}")
    seconds = {
        label: statistics.median(times)
        for label, times in zip(timed, time_in_turns(list(timed.values()), rounds), strict=True)
    }
    return row_of(name, work, chip, seconds, choice, failed)


def checked(work: Workload, runs: Mapping[str, Run]) -> dict[str, str]:
    """Why those of the runs failed that did."""
    want = work.expected()

    def error_of(run: Run) -> float:
        work.reset()
        return work.error(run(), want)

    return failures(runs, error_of, tolerance(work.problem.dtype))


def row_of(
    name: str, work: Workload, chip: Chip, seconds: Mapping[str, float], choice: str | None, failed: Mapping[str, str]
) -> dict[str, Any]:
    """Ratios above 1: ours is faster.  `against_*` are those of the best kernel, `library_*` of what runs untold."""
    ours = {label: s for label, s in seconds.items() if label not in OTHERS}
    best = min(ours, key=lambda label: ours[label])
    p = work.problem
    row: dict[str, Any] = {
        "name": name, "kind": p.kind, "dtype": p.dtype, "layout": p.layout, "m": p.m, "n": p.n, "k": p.k,
        "microseconds": {label: round(s * 1e6, 2) for label, s in seconds.items()},
        "best": best, "library": choice, "failed": dict(failed),
        "library_against_torch": seconds["torch"] / seconds[choice] if choice in seconds else None,
        **{f"against_{rival}": seconds[rival] / ours[best] if rival in seconds else None for rival in OTHERS},
    }  # fmt: skip
    if work.num_bytes:
        row["share_of_copy_rate"] = work.num_bytes / ours[best] / chip.bandwidth
    if work.flops:
        top = chip.flops[p.dtype] / 1e12
        row["tflops"] = work.flops / ours[best] / 1e12
        row["torch_tflops"] = work.flops / seconds["torch"] / 1e12
        row["roof_tflops"], row["below_roof"] = top, 1 - row["tflops"] / top
    return row
