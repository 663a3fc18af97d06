"""Products of experts, forward, dgrad and wgrad: one launch of the grouped kernel against a loop of cuBLAS calls.

    python bench/grouped_gemm.py --out bench/results/grouped_gemm.json

Layers of Mixtral, Qwen3-MoE and DeepSeek-V3, the experts of one rank; rows spread evenly, and unevenly, with an expert
that has none.  Rivals: the shipped configurations that the roof model puts first, what the table chooses,
`torch._grouped_mm`, and a loop of torch.mm, which is given the sizes on the host for nothing.  Numbers are checked
against fp32 before anything is timed; rivals take turns with cold caches, and medians are reported.  Exit status 2
without a GPU, 1 where numbers are wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH.parent / "kernels"), str(BENCH)]

import torch  # noqa: E402
from gemm_contest import RIVALS_PER_SHAPE, Deadline, Run, failures, reason  # noqa: E402
from ndtp_kernels.choice import roof  # noqa: E402
from ndtp_kernels.choice.chips import Chip, detect  # noqa: E402
from ndtp_kernels.choice.problem import TORCH  # noqa: E402
from ndtp_kernels.choice.selection import Options  # noqa: E402
from ndtp_kernels.choice.table import candidates, choose_for, default_table  # noqa: E402
from ndtp_kernels.errors import fallbacks_raise  # noqa: E402
from ndtp_kernels.grouped import GroupedCall, grouped_gemm, grouped_wgrad, library_takes  # noqa: E402
from ndtp_kernels.tools.tuning import options_for, time_in_turns, tolerance  # noqa: E402
from torch import Tensor  # noqa: E402

# experts of a rank, hidden, features of the product that leaves them; rows of the rank
LAYERS = {
    "mixtral-8x7b up": (8, 4096, 28672, 16384),
    "qwen3-30b-a3b up, e=8": (16, 2048, 1536, 16384),
    "deepseek-v3 up, e=32": (8, 7168, 4096, 8192),
    "deepseek-v3 down, e=32": (8, 2048, 7168, 8192),
}
KINDS = ("grouped", "grouped_dgrad", "grouped_wgrad")


def spread(rows: int, experts: int, evenly: bool, seed: int = 0) -> list[int]:
    """Rows of each expert."""
    if evenly:
        return [rows * (i + 1) // experts - rows * i // experts for i in range(experts)]
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(experts, dtype=torch.float64).exponential_(generator=generator) ** 1.5
    weights[experts // 2] = 0
    ends = (rows * weights.cumsum(0) / weights.sum()).round().long().tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclass
class Contest:
    """One product of all experts of a rank, by everything that can compute it."""

    kind: str
    left: Tensor
    right: Tensor
    offsets: Tensor
    sizes: list[int]

    @property
    def outer(self) -> bool:
        return self.kind == "grouped_wgrad"

    def ours(self, options: Options) -> Tensor:
        if self.outer:
            return grouped_wgrad(self.left, self.right, self.offsets, sizes=self.sizes, options=options)
        turned = self.kind == "grouped"
        how: dict[str, Any] = {"transpose_b": turned, "sizes": self.sizes, "options": options}
        return grouped_gemm(self.left, self.right, self.offsets, **how)

    def looped(self, wide: bool = False) -> Tensor:
        left, right = (x.float() if wide else x for x in (self.left, self.right))
        if self.outer:
            parts = zip(left.split(self.sizes), right.split(self.sizes), strict=True)
            return torch.stack([y.mT @ x for y, x in parts])
        right = right.mT if self.kind == "grouped" else right
        c = left.new_empty(left.shape[0], right.shape[2])
        for rows, one, out in zip(left.split(self.sizes), right, c.split(self.sizes), strict=True):
            torch.mm(rows, one, out=out)
        return c

    def library(self) -> Tensor:
        if self.outer:
            return torch._grouped_mm(self.left.mT, self.right, offs=self.offsets[1:])
        right = self.right.mT if self.kind == "grouped" else self.right
        return torch._grouped_mm(self.left, right, offs=self.offsets[1:])

    def call(self, options: Options) -> GroupedCall:
        c = torch.empty_like(self.looped())
        return GroupedCall(self.left, self.right, c, self.offsets, self.outer, self.kind == "grouped", options)

    def rivals(self, chip: Chip) -> tuple[dict[str, Run], str]:
        """And the label of what the table, or the model, would choose."""
        table, problem = default_table(), self.call(Options()).problem()
        ranked = sorted(
            (c for c in candidates(problem, chip, table) if c != TORCH),
            key=lambda c: roof.estimate(problem, c, chip).seconds,
        )
        choice = choose_for(problem, chip, table)
        runs: dict[str, Run] = {"loop": self.looped}
        if library_takes(self.left, self.right):
            runs["torch"] = self.library
        for config in dict.fromkeys((*ranked[:RIVALS_PER_SHAPE], choice)):
            if config != TORCH:
                runs[str(config)] = lambda config=config: self.ours(options_for(config))  # type: ignore[misc]
        return runs, str(choice)


def contests(layer: tuple[int, int, int, int], evenly: bool, device: torch.device) -> list[Contest]:
    experts, k, n, rows = layer
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

    sizes = spread(rows, experts, evenly)
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0, dtype=torch.int32)
    x, w, dy = random(rows, k), random(experts, n, k, scale=k**-0.5), random(rows, n, scale=n**-0.5)
    operands = {"grouped": (x, w), "grouped_dgrad": (dy, w), "grouped_wgrad": (dy, x)}
    return [Contest(kind, *operands[kind], offsets, sizes) for kind in KINDS]


def row_of(name: str, contest: Contest, chip: Chip) -> dict[str, Any]:
    runs, choice = contest.rivals(chip)
    want = contest.looped(wide=True)

    def error_of(run: Run) -> float:
        return float((run().float() - want).abs().max() / want.abs().max().clamp(min=1e-6))

    failed = failures(runs, error_of, tolerance("bfloat16"))
    timed = {label: run for label, run in runs.items() if label not in failed}
    times = time_in_turns(list(timed.values()), 5)
    seconds = {label: statistics.median(each) for label, each in zip(timed, times, strict=True)}
    ours = {label: each for label, each in seconds.items() if label not in ("loop", "torch")}
    best = min(ours, key=lambda label: ours[label]) if ours else None
    row: dict[str, Any] = {
        "name": name, "kind": contest.kind, "sizes": contest.sizes, "chosen": choice, "best": best, "failed": failed,
        "microseconds": {label: round(each * 1e6, 2) for label, each in seconds.items()},
    }  # fmt: skip
    for rival in ("loop", "torch"):
        known = best is not None and rival in seconds
        row[f"against_{rival}"] = seconds[rival] / ours[best] if known and best else None
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--seconds", type=float, default=240.0, help="time budget; what does not fit is listed")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench/grouped_gemm.py: no GPU here; nothing was measured", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    chip = detect(device)
    assert chip is not None
    with fallbacks_raise():
        report = {"device": torch.cuda.get_device_name(device), **measure(device, chip, Deadline.after(chosen.seconds))}
    if chosen.out:
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, why in report["failed"].items():
        print(f"failed: {name}: {why}")
    wrong = any("wrong numbers" in why for row in report["rows"] for why in row["failed"].values())
    return int(bool(report["failed"]) or wrong)


def measure(device: torch.device, chip: Chip, deadline: Deadline) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name, layer in LAYERS.items():
        for evenly in (True, False):
            label = f"{name}, {'even' if evenly else 'uneven'}"
            for contest in () if deadline.passed(label) else contests(layer, evenly, device):
                try:
                    rows.append(row_of(label, contest, chip))
                except Exception as error:  # the next one may do
                    failed[f"{label} {contest.kind}"] = reason(error)
                else:
                    print(spoken(rows[-1]), flush=True)
    return {"chip": chip.name, "rows": rows, "failed": failed, "not_measured": deadline.skipped}


def spoken(row: dict[str, Any]) -> str:
    ratios = (f"{row[f'against_{rival}'] or float('nan'):5.2f} x {rival}" for rival in ("loop", "torch"))
    return f"{row['name']:36} {row['kind']:14} {'  '.join(ratios)}   best: {row['best']}, chosen: {row['chosen']}"


if __name__ == "__main__":
    sys.exit(main())
