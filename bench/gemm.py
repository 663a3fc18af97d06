"""Kernels against cuBLAS, eager torch, torch.compile and a bare persistent Triton kernel, on one GPU.

    python bench/gemm.py --all --out FILE        everything, in under eight minutes; needs nothing but the repository
    python bench/gemm.py --plain --quick         one part, fewer shapes

Numbers are checked against fp32 before anything is timed.  Rivals take turns, round by round, with cold caches; medians
are reported.  What fails (a kernel that does not compile, memory that runs out) is listed and the rest goes on; so is
what the time did not allow.  Exit status: 0 goals met, 1 missed, unmeasured or wrong numbers, 2 no GPU.
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

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH.parent / "kernels"), str(BENCH)]

import torch  # noqa: E402
from gemm_contest import COMPILE_MODE, OTHERS, Deadline, Run, compete, configurations, failures, reason  # noqa: E402
from ndtp_kernels import interface  # noqa: E402
from ndtp_kernels.choice.chips import Chip, detect  # noqa: E402
from ndtp_kernels.choice.selection import Options  # noqa: E402
from ndtp_kernels.choice.table import Config, default_table  # noqa: E402
from ndtp_kernels.errors import fallbacks_raise  # noqa: E402
from ndtp_kernels.tools.tuning import options_for, time_in_turns  # noqa: E402
from ndtp_kernels.tools.workloads import TRANSPOSES, Workload, workload  # noqa: E402
from tensor_core_counters import count, read_counters  # noqa: E402
from torch import Tensor  # noqa: E402

# hidden, ffn, query + key + value width
MODELS = {"llama3-8b": (4096, 14336, 6144), "llama3-70b": (8192, 28672, 10240)}
TOKENS = (2048, 8192, 32768)
GRIDS = {"whole": (1, 1, 1), "2x2x2": (2, 2, 2), "1x4x2": (1, 4, 2)}
SCATTER = ("scatter", "scatter_backward")
FUSED = ("epilogue", "backward")
FUSED_SHAPES = [(4096, 7168, 1024), (4096, 7168, 2048), (8192, 3584, 2048), (8192, 14336, 4096)]
BLOCK = (8192, 4096, 14336)  # tokens, hidden, ffn
COMPILES_IN = 90  # seconds that the tuning of a block took on an H200, of which nothing can be left out
COUNTED = 6  # the largest plain products, whose tensor-core counters are read
# Part -> when it has to be done, as a share of the time; one that is done early leaves its time to the next.
SHARES = {"scatter": 0.1, "block": 0.25, "fused": 0.5, "plain": 0.75, "compile": 0.88, "counters": 1.0}
# (goal, column of a row, wanted geometric mean, wanted lowest)
GOALS = [
    ("plain", "against_torch", 0.90, 0.80),
    *((kind, "against_torch", 1.15, 0.0) for kind in (*SCATTER, *FUSED)),  # a pass over memory is saved
    ("block", "against_best", 1.00, 0.0),
]
# Written down beside the goals, without one of their own.
NOTED = [
    ("plain", "library_against_torch"), ("plain", "against_persistent"), ("plain compile", "against_compile"),
    *((kind, "against_compile") for kind in (*SCATTER, *FUSED)), ("wgrad", "against_torch"),
]  # fmt: skip


class Bench:
    """The device, the clock, and what was found so far."""

    def __init__(self, device: torch.device, chip: Chip, deadline: Deadline, quick: bool) -> None:
        self.device, self.chip, self.deadline, self.quick = device, chip, deadline, quick
        self.rows: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.counters: Any = {"unavailable": "not asked for"}

    def work(self, kind: str, shape: tuple[int, int, int], layout: str = "nt") -> Workload:
        return workload(kind, *shape, dtype=torch.bfloat16, device=self.device, layout=layout)

    def keep(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Add a row; a product that fails as a whole is listed."""
        try:
            row = make()
        except Exception as error:
            self.failed[name] = reason(error)
            torch.cuda.empty_cache()
            print(f"{name:40} failed: {self.failed[name]}", flush=True)
            return
        self.rows.append(row)
        for label, why in row["failed"].items():
            self.failed[f"{name}, {label}"] = why
        print(line(row), flush=True)

    def compete(
        self, name: str, kind: str, shape: tuple[int, int, int], layout: str = "nt", compiled: bool = False
    ) -> None:
        """One product, filed under the workload's kind; plain ones beside torch.compile apart, or they count twice."""

        def make() -> dict[str, Any]:
            work, more = self.work(kind, shape, layout), {}
            if kind == "plain" and layout == "nt" and self.chip.has_tma:
                from persistent_rival import persistent_product

                more["persistent"] = lambda: persistent_product(*work.operands, self.chip.num_sms)
            if compiled:
                torch._dynamo.reset()
                more["compile"] = torch.compile(work.eager, mode=COMPILE_MODE)
            rounds = 5 if math.prod(shape) > 1e12 else 9
            filed = "plain compile" if kind == "plain" and compiled else kind
            return {**compete(name, work, self.chip, rounds, more), "kind": filed}

        self.keep(name, make)


def products(quick: bool) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Name and (M, N, K) of MLP and attention projections, whole and as the shards of 3D grids: each local product
    has M over z, N over y and K over x."""
    models = dict(list(MODELS.items())[:1]) if quick else MODELS
    seen = set()
    for model, (hidden, ffn, qkv) in models.items():
        projections = {"up": (ffn, hidden), "down": (hidden, ffn), "qkv": (qkv, hidden), "o": (hidden, hidden)}
        for projection, (n, k) in projections.items():
            for tokens in TOKENS[:1] if quick else TOKENS:
                for grid, (z, y, x) in GRIDS.items():
                    shape = (tokens // z, n // y, k // x)
                    if shape not in seen:
                        seen.add(shape)
                        yield f"{model} {projection} {tokens} {grid}", shape


def plain(bench: Bench, deadline: Deadline) -> None:
    """All four transposes of every product; forward's, dgrad's and wgrad's first."""
    for layout in ("nt", "nn", "tn", "tt"):
        assert layout in TRANSPOSES
        for name, shape in products(bench.quick):
            if not deadline.passed(f"{name} {layout}"):
                bench.compete(f"{name} {layout}", "plain", shape, layout)


def compiled_plain(bench: Bench, deadline: Deadline) -> None:
    """torch.compile beside plain products, as many as the time allows: each costs seconds of its own tuning."""
    for name, shape in products(bench.quick):
        if " 8192 " in name and not deadline.passed(f"{name} compile"):
            bench.compete(f"{name} compile", "plain", shape, compiled=True)


def scatter(bench: Bench, deadline: Deadline) -> None:
    """What follows a scatter, the path of 2D and 3D grids, and so the first to know about."""
    kinds(bench, deadline, SCATTER, SCATTER)


def fused(bench: Bench, deadline: Deadline) -> None:
    """Epilogues, dgrad with the activation's gradient; wgrad."""
    kinds(bench, deadline, (*FUSED, "wgrad"), FUSED)


def kinds(bench: Bench, deadline: Deadline, wanted: Sequence[str], compiled: Sequence[str]) -> None:
    """Products of some kinds; torch.compile, which takes seconds to tune, joins for some while the part has time."""
    for shape in FUSED_SHAPES[: 1 if bench.quick else None]:
        for kind in wanted:
            name = " ".join(map(str, (kind, *shape)))
            rival = kind in compiled and not deadline.passed(f"{name} compile")
            if not bench.deadline.passed(name):
                bench.compete(name, kind, shape, compiled=rival)


def block(bench: Bench, deadline: Deadline) -> None:
    if not deadline.passed("mlp block"):
        beside_compile = deadline.remaining >= COMPILES_IN
        if not beside_compile:
            deadline.skipped.append("mlp block compile")
        bench.keep("mlp block", lambda: mlp_block(bench, beside_compile))


def mlp_block(bench: Bench, beside_compile: bool) -> dict[str, Any]:
    """A dense MLP block forward and backward: the kernels, eager torch, and torch.compile where the time allows it."""
    tokens, hidden, ffn = BLOCK
    device, generator = bench.device, torch.Generator(bench.device).manual_seed(0)

    def random(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

    x, dy = random(tokens, hidden, scale=1.0), random(tokens, hidden, scale=1.0)
    w1, w2, b1 = random(ffn, hidden, scale=hidden**-0.5), random(hidden, ffn, scale=ffn**-0.5), random(ffn, scale=0.1)
    leaves = [t.clone().requires_grad_() for t in (x, w1, b1, w2)]

    def ours(options: Options) -> tuple[Tensor, ...]:
        first = interface.gemm(
            x, w1, b1, transpose_b=True, activation="gelu", return_preactivation=True, options=options
        )
        y = interface.gemm(first.c, w2, transpose_b=True, options=options)
        d1 = interface.backward_gemm(dy, w2, first.pre, activation="gelu", options=options)
        return (
            y,
            interface.gemm(d1, w1, options=options),
            interface.gemm(d1, x, transpose_a=True, options=options),
            d1.sum(0),
            interface.gemm(dy, first.c, transpose_a=True, options=options),
        )

    def dense(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.nn.functional.gelu(torch.nn.functional.linear(x, w1, b1)), w2)

    def both_ways(forward: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
        y = forward(*inputs)
        return (y.detach(), *torch.autograd.grad(y, inputs, grad))

    runs: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "kernels": lambda: ours(Options(backend="triton")),
        "library": lambda: ours(Options()),
        "torch": lambda: both_ways(dense, leaves, dy),
    }
    if beside_compile:
        torch._dynamo.reset()
        compiled = torch.compile(dense, mode=COMPILE_MODE)
        runs["compile"] = lambda: both_ways(compiled, leaves, dy)
    failed = block_failures(runs, both_ways(dense, [t.detach().float().requires_grad_() for t in leaves], dy.float()))
    runs = {label: run for label, run in runs.items() if label not in failed}
    timed = zip(runs, time_in_turns(list(runs.values()), 9), strict=True)
    seconds = {label: statistics.median(times) for label, times in timed}
    ours_best = min((label for label in seconds if label not in OTHERS), key=lambda label: seconds[label])
    by_torch = {label: s for label, s in seconds.items() if label in OTHERS}
    rate = 6 * 2 * tokens * hidden * ffn / seconds[ours_best] / 1e12
    top = bench.chip.flops["bfloat16"] / 1e12
    return {
        "name": f"mlp block {tokens} {hidden} {ffn}", "kind": "block", "best": ours_best, "failed": failed,
        "microseconds": {label: round(s * 1e6, 1) for label, s in seconds.items()},
        **{f"against_{label}": s / seconds[ours_best] for label, s in by_torch.items()},
        "against_best": min(by_torch.values()) / seconds[ours_best],
        "tflops": rate, "roof_tflops": top, "below_roof": 1 - rate / top,
    }  # fmt: skip


def block_failures(runs: dict[str, Any], expected: Sequence[Tensor]) -> dict[str, str]:
    """Why those of the runs failed that did: the worst of output and gradients counts."""

    def error_of(run: Callable[[], tuple[Tensor, ...]]) -> float:
        pairs = zip(run(), expected, strict=True)
        errors = [float((got.float() - want).abs().max() / want.abs().max()) for got, want in pairs]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    return failures(runs, error_of, 3e-2)


def counters(bench: Bench, deadline: Deadline) -> None:
    """Tensor-core utilization of the largest plain products, by torch and by the best kernel."""
    rows = sorted((r for r in bench.rows if r["kind"] == "plain"), key=lambda r: -math.prod((r["m"], r["n"], r["k"])))
    jobs = []
    for row in [r for r in rows if r["layout"] == "nt"][:COUNTED]:
        named = configurations(bench.work("plain", (row["m"], row["n"], row["k"])), bench.chip)
        for label in ("torch", row["best"]):
            shape, code = (row["m"], row["n"], row["k"]), named[label].code
            jobs.append({"label": f"{row['name']} {label}", "shape": shape, "config": code})
    if jobs and not deadline.passed("tensor-core counters"):
        bench.counters = read_counters(Path(__file__), jobs, counted_runs(jobs, bench), deadline.remaining)


def counted_runs(jobs: Iterable[dict[str, Any]], bench: Bench) -> dict[str, Run]:
    """Label -> one product.  All operands are made first: no kernel but the product's may run while counting."""
    works = {job["label"]: bench.work("plain", tuple(job["shape"])) for job in jobs}
    options = {job["label"]: options_for(Config.from_code(job["config"])) for job in jobs}
    return {label: lambda work=work, label=label: work.ours(options[label]) for label, work in works.items()}  # type: ignore[misc]


def line(row: dict[str, Any]) -> str:
    ratios = {rival: row.get(f"against_{rival}") for rival in OTHERS}
    text = "  ".join(f"{ratio:.3f}x {rival}" for rival, ratio in ratios.items() if ratio)
    if "tflops" in row:
        roof = f"{row['tflops']:6.1f} TFLOP/s {row['below_roof']:6.1%} below the roof"
    else:
        roof = f"{row['share_of_copy_rate']:6.1%} of the rate of a copy"
    return f"{row['name']:36} {row['microseconds'][row['best']]:9.1f} us {roof}  {text}  {row['best']}"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal and what was measured; "met" is None where nothing was, or where there is no goal."""
    found = []
    for kind, column, *wanted in [*GOALS, *NOTED]:
        named = {r["name"]: r[column] for r in rows if r["kind"] == kind and r.get(column)}
        verdict: dict[str, Any] = {"goal": f"{kind} {column}", "wanted": wanted or None, "count": len(named)}
        verdict |= {"mean": None, "lowest": None, "lowest_at": None, "met": None}
        if named:
            mean, lowest = geometric_mean(list(named.values())), min(named.values())
            verdict |= {"mean": mean, "lowest": lowest, "lowest_at": min(named, key=lambda name: named[name])}
            if wanted:
                verdict["met"] = mean >= wanted[0] and lowest >= wanted[1]
        found.append(verdict)
    return found


def spoken(verdict: dict[str, Any]) -> str:
    if verdict["mean"] is None:
        return f"{verdict['goal']:32} not measured"
    end = "no goal"
    if verdict["wanted"]:
        end = f"wanted {verdict['wanted'][0]:.2f}x, none under {verdict['wanted'][1]:.2f}x: "
        end += "met" if verdict["met"] else "MISSED"
    means = f"geometric mean {verdict['mean']:.3f}x  lowest {verdict['lowest']:.3f}x ({verdict['lowest_at']})"
    return f"{verdict['goal']:32} {means}  of {verdict['count']}  {end}"


def environment(device: torch.device, chip: Chip) -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name(device), "chip": chip.name, "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__, "table": default_table().fingerprint(),
        "date": time.strftime("%Y-%m-%d"), "compile_mode": COMPILE_MODE,
    }  # fmt: skip


PARTS = {
    "scatter": scatter,
    "block": block,
    "fused": fused,
    "plain": plain,
    "compile": compiled_plain,
    "counters": counters,
}


def measure(bench: Bench, parts: Iterable[str]) -> None:
    for part in parts:
        try:
            PARTS[part](bench, bench.deadline.part(SHARES[part]))
        except Exception as error:
            bench.failed[part] = reason(error)


def findings(bench: Bench) -> dict[str, Any]:
    return {
        "goals": verdicts(bench.rows), "tensor_cores": bench.counters, "failed": bench.failed,
        "not_measured": bench.deadline.skipped, "rows": bench.rows,
    }  # fmt: skip


def summary(report: dict[str, Any]) -> Iterator[str]:
    yield from map(spoken, report["goals"])
    yield f"tensor cores: {json.dumps(report['tensor_cores'])}"
    yield from (f"failed: {name}: {why}" for name, why in report["failed"].items())
    yield from (f"not measured, out of time: {name}" for name in report["not_measured"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for flag in ("all", "scatter", "plain", "fused", "block", "quick"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--seconds", type=float, default=430.0, help="time budget; what does not fit is listed")
    parser.add_argument("--counted", metavar="JOBS", help="run these products once, under a profiler: for --all")
    chosen = parser.parse_args(arguments)
    parts = [part for part in PARTS if chosen.all or getattr(chosen, part, False)]
    if not parts and not chosen.counted:
        parser.error("nothing to do: --all, --scatter, --block, --fused or --plain")
    if not torch.cuda.is_available():
        print("bench/gemm.py: no GPU here; nothing was measured", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    chip = detect(device)
    assert chip is not None
    bench = Bench(device, chip, Deadline.after(chosen.seconds), chosen.quick)
    if chosen.counted:
        with fallbacks_raise():
            count(counted_runs(json.loads(chosen.counted), bench))
        return 0
    try:
        with fallbacks_raise():
            measure(bench, parts)
    finally:  # an interrupted run keeps what it has
        report = {"environment": environment(device, chip), **findings(bench)}
        if chosen.out:
            chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(summary(report)))
    wrong = any("wrong numbers" in why for why in bench.failed.values())
    return 0 if all(goal["met"] for goal in report["goals"] if goal["wanted"]) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
