"""Kernels against cuBLAS, eager torch and torch.compile on one GPU.

    python bench/gemm.py --all --out FILE        everything, in under eight minutes; needs nothing but the repository
    python bench/gemm.py --plain --quick         one part, fewer shapes

Numbers are checked against fp32 before anything is timed.  Rivals take turns, round by round, with cold caches; medians
are reported, and the ratio of each to the best rival.  Exit status: 0 goals met, 1 missed or wrong numbers, 2 no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels")]

import torch  # noqa: E402
from ndtp_kernels import interface, roof  # noqa: E402
from ndtp_kernels.chips import detect  # noqa: E402
from ndtp_kernels.config import TORCH, candidates, default_table  # noqa: E402
from ndtp_kernels.selection import Options  # noqa: E402
from ndtp_kernels.tuning import options_for, time_in_turns, tolerance  # noqa: E402
from ndtp_kernels.workloads import KINDS, Workload, workload  # noqa: E402

# hidden, ffn, query + key + value width
MODELS = {"llama3-8b": (4096, 14336, 6144), "llama3-70b": (8192, 28672, 10240)}
TOKENS = (2048, 8192, 32768)
GRIDS = {"whole": (1, 1, 1), "2x2x2": (2, 2, 2), "1x4x2": (1, 4, 2)}
GOALS = {"plain": (1.00, 0.93), "fused": (1.15, 0.0), "fused_compile": (1.00, 0.0), "block": (1.10, 0.0)}
RIVALS_PER_SHAPE = 3  # kernel configurations timed for one product: the model's favourites


def products(quick: bool) -> Iterator[tuple[str, int, int, int]]:
    """(name, M, N, K) of MLP and attention projections, whole and as the shards of 3D grids: each local product
    has M over z, N over y and K over x."""
    models = dict(list(MODELS.items())[:1]) if quick else MODELS
    seen = set()
    for model, (hidden, ffn, qkv) in models.items():
        for projection, n, k in (
            ("up", ffn, hidden),
            ("down", hidden, ffn),
            ("qkv", qkv, hidden),
            ("o", hidden, hidden),
        ):
            for tokens in TOKENS[:1] if quick else TOKENS:
                for grid, (z, y, x) in GRIDS.items():
                    shape = (tokens // z, n // y, k // x)
                    if shape not in seen:
                        seen.add(shape)
                        yield f"{model} {projection} {tokens} {grid}", *shape


class Deadline:
    """Parts of the benchmark share a time budget; what did not fit is listed, not left out in silence."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.skipped: list[str] = []

    def passed(self, name: str) -> bool:
        if time.monotonic() > self.end:
            self.skipped.append(name)
            return True
        return False


def check(name: str, work: Workload, run: Callable[[], torch.Tensor], want: torch.Tensor) -> None:
    """Wrong numbers end the benchmark: a fast wrong kernel is worth nothing."""
    work.reset()
    error = work.error(run(), want)
    if not error <= tolerance(getattr(torch, work.problem.dtype)):
        raise SystemExit(f"{name}: wrong numbers, relative error {error:.3g}")


def compete(name: str, work: Workload, device: torch.device, rounds: int, compiled: bool) -> dict[str, Any]:
    """One product: the library's choice, the best few kernels, eager torch and, if asked, torch.compile."""
    chip = detect(device)
    assert chip is not None
    runs: dict[str, Callable[[], torch.Tensor]] = {"torch": work.eager}
    if work.problem.kind == "scatter":
        runs["kernel"] = lambda: work.ours(Options(backend="triton"))
    else:
        ranked = sorted(
            (c for c in candidates(work.problem, chip, default_table()) if c != TORCH),
            key=lambda c: roof.estimate(work.problem, c, chip).seconds,
        )
        for config in ranked[:RIVALS_PER_SHAPE]:
            runs[str(config)] = lambda config=config: work.ours(options_for(config))  # type: ignore[misc]
        runs["library"] = lambda: work.ours(Options())
    if compiled:
        torch._dynamo.reset()
        runs["compile"] = torch.compile(work.eager, mode="max-autotune-no-cudagraphs")
    want = work.expected()
    for label, run in runs.items():
        check(f"{name} {label}", work, run, want)
    del want
    seconds = {
        label: statistics.median(times)
        for label, times in zip(runs, time_in_turns(list(runs.values()), rounds), strict=True)
    }
    ours = {label: s for label, s in seconds.items() if label not in ("torch", "compile")}
    best = min(ours, key=lambda label: ours[label])
    p = work.problem
    row: dict[str, Any] = {
        "name": name, "kind": p.kind, "layout": p.layout, "m": p.m, "n": p.n, "k": p.k,
        "microseconds": {label: round(s * 1e6, 2) for label, s in seconds.items()},
        "best": best, "against_torch": seconds["torch"] / ours[best],
        "library_against_torch": seconds["torch"] / ours.get("library", ours[best]),
        "against_compile": seconds["compile"] / ours[best] if "compile" in seconds else None,
    }  # fmt: skip
    if work.flops:
        row["tflops"] = work.flops / ours[best] / 1e12
        row["share_of_roof"] = row["tflops"] * 1e12 / chip.flops[p.dtype]
    return row


def plain(device: torch.device, quick: bool, deadline: Deadline) -> list[dict[str, Any]]:
    """All four transposes of every product (the two rare ones on every third shape)."""
    rows = []
    for number, (name, m, n, k) in enumerate(products(quick)):
        for layout in ("nt", "nn", "tn", "tt") if number % 3 == 0 else ("nt", "nn", "tn"):
            if deadline.passed(f"{name} {layout}"):
                continue
            work = workload("plain", m, n, k, dtype=torch.bfloat16, device=device, layout=layout)
            rows.append(compete(f"{name} {layout}", work, device, 5 if m * n * k > 1e12 else 9, False))
            show(rows[-1])
    return rows


def fused(device: torch.device, quick: bool, deadline: Deadline) -> list[dict[str, Any]]:
    """Epilogues, gated pairs, dgrad with the activation's gradient, wgrad, and what follows a scatter."""
    shapes = [(8192, 14336, 4096), (4096, 7168, 2048), (2048, 7168, 4096)][: 1 if quick else 3]
    rows = []
    for kind in KINDS[1:]:
        for number, (m, n, k) in enumerate(shapes):
            name = f"{kind} {m} {n} {k}"
            if deadline.passed(name):
                continue
            work = workload(kind, m, n, k, dtype=torch.bfloat16, device=device)
            rows.append(compete(name, work, device, 11, compiled=number == 0 and kind != "wgrad"))
            show(rows[-1])
    return rows


def block(device: torch.device, deadline: Deadline) -> list[dict[str, Any]]:
    """A dense MLP block forward and backward: the kernels, eager torch, and torch.compile."""
    tokens, hidden, ffn = 8192, 4096, 14336
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

    x, dy = random(tokens, hidden, scale=1.0), random(tokens, hidden, scale=1.0)
    w1, w2, b1 = random(ffn, hidden, scale=hidden**-0.5), random(hidden, ffn, scale=ffn**-0.5), random(ffn, scale=0.1)
    leaves = [t.clone().requires_grad_() for t in (x, w1, b1, w2)]

    def ours() -> tuple[torch.Tensor, ...]:
        first = interface.gemm(x, w1, b1, transpose_b=True, activation="gelu", return_preactivation=True)
        interface.gemm(first.c, w2, transpose_b=True)
        d1 = interface.backward_gemm(dy, w2, first.pre, activation="gelu", return_column_sums=True)
        return (
            interface.gemm(d1.c, w1),
            interface.gemm(d1.c, x, transpose_a=True),
            d1.column_sums.bfloat16(),
            interface.gemm(dy, first.c, transpose_a=True),
        )

    def dense(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.nn.functional.gelu(torch.nn.functional.linear(x, w1, b1)), w2)

    def backward_of(forward: Callable[..., torch.Tensor]) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: torch.autograd.grad(forward(*leaves), leaves, dy)

    if deadline.passed("block"):
        return []
    torch._dynamo.reset()
    runs: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        "kernels": ours,
        "torch": backward_of(dense),
        "compile": backward_of(torch.compile(dense, mode="max-autotune-no-cudagraphs")),
    }
    exact = [t.detach().float().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(dense(*exact), exact, dy.float())
    for label, run in runs.items():
        for number, (got, right) in enumerate(zip(run(), expected, strict=True)):
            error = float((got.float() - right).abs().max() / right.abs().max())
            if not error <= 3e-2:
                raise SystemExit(f"block {label}: gradient {number} is wrong, relative error {error:.3g}")
    del expected, exact
    seconds = [statistics.median(times) for times in time_in_turns(list(runs.values()), 9)]
    by_label = dict(zip(runs, seconds, strict=True))
    row = {
        "name": f"mlp block {tokens} {hidden} {ffn}", "kind": "block",
        "microseconds": {label: round(s * 1e6, 1) for label, s in by_label.items()}, "best": "kernels",
        "against_torch": by_label["torch"] / by_label["kernels"],
        "against_compile": by_label["compile"] / by_label["kernels"],
        "tflops": 6 * 2 * tokens * hidden * ffn / by_label["kernels"] / 1e12,
    }  # fmt: skip
    show(row)
    return [row]


def show(row: dict[str, Any]) -> None:
    ratio = row.get("against_compile")
    print(
        f"{row['name']:36} {row['microseconds'].get(row['best'], 0):9.1f} us {row.get('tflops', 0):7.1f} TFLOP/s  "
        f"{row['against_torch']:.3f}x torch  {f'{ratio:.3f}x compile' if ratio else '':15} {row['best']}",
        flush=True,
    )


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else float("nan")


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal, what was measured, and whether it is met."""
    parts = {
        "plain": [r["against_torch"] for r in rows if r["kind"] == "plain"],
        "fused": [r["against_torch"] for r in rows if r["kind"] in ("epilogue", "gated", "backward")],
        "fused_compile": [
            r["against_compile"]
            for r in rows
            if r["kind"] in ("epilogue", "gated", "backward") and r["against_compile"]
        ],
        "block": [min(r["against_torch"], r["against_compile"]) for r in rows if r["kind"] == "block"],
    }
    found = []
    for goal, ratios in parts.items():
        if ratios:
            mean, lowest = geometric_mean(ratios), min(ratios)
            wanted_mean, wanted_lowest = GOALS[goal]
            met = mean >= wanted_mean and lowest >= wanted_lowest
            found.append({"goal": goal, "mean": mean, "lowest": lowest, "wanted": GOALS[goal], "met": met})
    return found


def environment(device: torch.device) -> dict[str, Any]:
    import triton

    chip = detect(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "chip": chip.name if chip else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "table": default_table().fingerprint(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for part in ("all", "plain", "fused", "block", "quick"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--seconds", type=float, default=450.0, help="time budget; what does not fit is listed")
    chosen = parser.parse_args(arguments)
    if not (chosen.all or chosen.plain or chosen.fused or chosen.block):
        parser.error("nothing to do: --all, --plain, --fused or --block")
    if not torch.cuda.is_available():
        print("bench/gemm.py: no GPU here; nothing was measured", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    deadline = Deadline(chosen.seconds)
    rows: list[dict[str, Any]] = []
    # The short parts first: the long one fills whatever time is left.
    if chosen.all or chosen.block:
        rows += block(device, deadline)
    if chosen.all or chosen.fused:
        rows += fused(device, chosen.quick, deadline)
    if chosen.all or chosen.plain:
        rows += plain(device, chosen.quick, deadline)
    goals = verdicts(rows)
    for goal in goals:
        mark = "met" if goal["met"] else "MISSED"
        print(f"{goal['goal']:14} mean {goal['mean']:.3f}x lowest {goal['lowest']:.3f}x wanted {goal['wanted']} {mark}")
    if deadline.skipped:
        print(f"not measured, out of time: {len(deadline.skipped)} products")
    if chosen.out:
        report = {"environment": environment(device), "goals": goals, "rows": rows, "not_measured": deadline.skipped}
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if goals and all(goal["met"] for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
