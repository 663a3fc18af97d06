"""The benchmark on a CPU: its shapes, checks, rows, verdicts, counters.  Its timings need a GPU, and are injected."""

import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from ndtp_kernels import interface
from ndtp_kernels.choice import table
from ndtp_kernels.choice.chips import CHIPS
from ndtp_kernels.errors import KernelFallback, fallbacks_raise, warn_once
from ndtp_kernels.launch import Launch
from ndtp_kernels.tools import aot
from ndtp_kernels.tools.workloads import KINDS, workload

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import gemm as bench  # noqa: E402
import gemm_contest as contest  # noqa: E402
import grouped_gemm  # noqa: E402
import tensor_core_counters  # noqa: E402

CPU = torch.device("cpu")
H200 = CHIPS["h200"]
BF16 = {"dtype": torch.bfloat16, "device": CPU}
TINY = (16, 24, 32)


@pytest.fixture
def small(monkeypatch):
    """Tiny shapes, a compiler that changes nothing, and 1 us for everything.

    On a CPU the kernels' results come from torch; only their name and their time are made up.
    """
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(contest, "time_in_turns", lambda runs, rounds: [[1e-6] for _ in runs])
    monkeypatch.setattr(bench, "time_in_turns", lambda runs, rounds: [[1e-6] for _ in runs])
    monkeypatch.setattr(bench, "products", lambda quick: [("model up 8192 whole", TINY)])
    monkeypatch.setattr(bench, "FUSED_SHAPES", [TINY])
    monkeypatch.setattr(bench, "BLOCK", TINY)
    monkeypatch.setitem(sys.modules, "persistent_rival", Rival)
    return bench.Bench(CPU, H200, contest.Deadline.after(1000), quick=False)


class Rival:
    persistent_product = staticmethod(lambda a, b, num_sms: a @ b.mT)


@pytest.mark.filterwarnings("ignore::ndtp_kernels.errors.KernelFallback")
def test_every_part_leaves_its_rows(small, monkeypatch):
    monkeypatch.setattr(
        bench, "read_counters", lambda script, jobs, runs, seconds: {"percent": dict.fromkeys(runs, 50)}
    )
    bench.measure(small, bench.PARTS)
    report = json.loads(json.dumps(bench.findings(small)))
    assert report["failed"] == {} and report["not_measured"] == []
    rows = report["rows"]
    plain = [row for row in rows if row["kind"] == "plain"]
    (compiled,) = (row for row in rows if row["kind"] == "plain compile")
    assert [row["layout"] for row in plain] == ["nt", "nn", "tn", "tt"]
    assert {"torch", "persistent"} < set(plain[0]["microseconds"]) and "compile" in compiled["microseconds"]
    assert {row["kind"] for row in rows} == {*KINDS, "block", "plain compile"}
    for row in rows:
        assert row["against_torch"] == pytest.approx(1.0)
        if row["kind"].startswith("scatter"):
            assert row["share_of_copy_rate"] > 0
        else:
            assert row["below_roof"] == pytest.approx(1 - row["tflops"] / row["roof_tflops"])
    assert all(row["roof_tflops"] == pytest.approx(790) for row in plain)
    assert len(report["tensor_cores"]["percent"]) == 2, "torch and the best kernel"
    assert {g["goal"] for g in report["goals"] if g["wanted"] and g["count"]} == {
        f"{kind} against_{rival}"
        for kind, rivals in {"plain": ["torch"], "block": ["best"]}.items()
        for rival in rivals
    } | {f"{kind} against_torch" for kind in (*bench.FUSED, *bench.SCATTER)}
    assert any(
        "plain against_torch" in line and "wanted 0.90x, none under 0.80x" in line for line in bench.summary(report)
    )


@pytest.mark.filterwarnings("ignore::ndtp_kernels.errors.KernelFallback")
def test_a_kernel_that_fails_is_listed_and_the_rest_goes_on(small, monkeypatch):
    """One configuration the compiler refuses, one with wrong numbers, one product that no memory holds."""
    right = interface.gemm
    work = workload("plain", *TINY, **BF16)
    first, second, *others = [label for label in contest.rivals(work, H200)[0] if label != "torch"]
    assert others

    def faulty(*operands, options, **more):
        if str(options.config) == first:
            raise RuntimeError("PassManager::run failed\nand a page of MLIR")
        return right(*operands, options=options, **more) * (1.2 if str(options.config) == second else 1.0)

    monkeypatch.setattr(interface, "gemm", faulty)
    small.compete("one", "plain", TINY)
    (row,) = small.rows
    assert not {first, second} & set(row["microseconds"]) and set(others) <= set(row["microseconds"])
    assert small.failed[f"one, {first}"] == "RuntimeError: PassManager::run failed"
    assert "wrong numbers: relative error 0.2" in small.failed[f"one, {second}"]

    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "workload", too_large)
    small.compete("two", "plain", TINY)
    assert len(small.rows) == 1 and small.failed["two"] == "OutOfMemoryError: CUDA out of memory"


def test_numbers_that_are_no_numbers_fail():
    work = workload("plain", *TINY, **BF16)
    runs = {"right": work.eager, "nan": lambda: work.eager() * float("nan")}
    assert list(contest.checked(work, runs)) == ["nan"]


def test_a_kernel_that_torch_stands_in_for_is_not_timed():
    """As main does: a fallback raises there, even one that was warned of before."""
    work = workload("plain", *TINY, **BF16)
    with pytest.warns(KernelFallback):
        warn_once.cache_clear()
        contest.checked(work, contest.rivals(work, H200)[0])
    with fallbacks_raise():
        failed = contest.checked(work, contest.rivals(work, H200)[0])
    assert failed and "torch" not in failed and all("KernelFallback" in why for why in failed.values())


def test_shapes_cover_whole_and_sharded_projections():
    found = list(bench.products(quick=False))
    shapes = {shape for _, shape in found}
    assert (8192, 14336, 4096) in shapes  # 8B up, whole
    assert (4096, 7168, 2048) in shapes  # the same on 2x2x2
    assert (8192, 3584, 2048) in shapes  # and on 1x4x2
    assert (32768, 28672, 8192) in shapes and (2048, 28672, 8192) in shapes  # 70B up
    assert len(found) == len(shapes)


def test_every_part_has_a_share_of_the_time():
    assert list(bench.SHARES) == list(bench.PARTS)
    shares = list(bench.SHARES.values())
    assert shares == sorted(set(shares)) and shares[-1] == 1.0


def test_every_candidate_has_a_label_of_its_own():
    for kind in ("plain", "epilogue", "backward", "wgrad"):
        problem = table.Problem(2048, 4096, 4096, kind=kind)
        found = table.candidates(problem, H200, table.shipped_table())
        assert len({str(candidate) for candidate in found}) == len(found)


def test_verdicts_hold_the_goals():
    """A geometric mean at the goal with one product below the floor is a miss; nothing measured is no verdict."""

    def verdict(*ratios):
        rows = [{"name": str(i), "kind": "plain", "against_torch": ratio} for i, ratio in enumerate(ratios)]
        return next(v for v in bench.verdicts(rows) if v["goal"] == "plain against_torch")

    missed = verdict(1.2, 1.1, 0.7)
    assert missed["mean"] == pytest.approx(math.prod((1.2, 1.1, 0.7)) ** (1 / 3)) and missed["mean"] > 0.9
    assert missed["met"] is False and missed["lowest_at"] == "2"
    assert verdict(1.2, 1.1)["met"] is True
    assert verdict()["met"] is None and "not measured" in bench.spoken(verdict())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_claimed(capsys):
    assert bench.main(["--all"]) == 2
    assert "nothing was measured" in capsys.readouterr().err


def test_time_that_runs_out_is_reported(small):
    small.deadline.end = time.monotonic() - 1
    bench.measure(small, bench.PARTS)
    assert small.rows == [] and small.failed == {}
    # Two after a scatter, compiled too; the block; three fused, two compiled; four transposes; one compiled.
    assert len(small.deadline.skipped) == 2 + 2 + 1 + 3 + 2 + 4 + 1


def fake_ncu(folder, listing, rows, status=0):
    """A program that answers as Nsight Compute does, for products in the order in which they would be counted."""
    program = folder / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"if '--query-metrics' in sys.argv: print({listing!r}); sys.exit()\n"
        "assert '--counted' in sys.argv and '--clock-control' in sys.argv\n"
        f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({rows!r})\n"
        f"sys.exit({status})\n"
    )
    program.chmod(0o755)
    return str(program)


METRIC = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
JOBS = [{"label": "up torch"}, {"label": "up kernel"}]


def csv_of(*kernels):
    lines = ["==PROF== Connected to process 7", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    lines += [f'"{i}","{name}","{METRIC}","%","{value}"' for i, (name, value) in enumerate(kernels)]
    return "\n".join(lines) + "\n"


def test_counters_by_ncu(tmp_path, monkeypatch):
    """A product that takes two kernels counts by its busier one; separators count for nothing."""
    mark = ("void at::native::distribution_elementwise_grid_stride_kernel<float>", "0")
    rows = csv_of(mark, ("nvjet_tst_128x256", "91.5"), mark, ("gemm_kernel", "88.25"), ("reduce_kernel", "0.00"))
    monkeypatch.setattr(
        tensor_core_counters.shutil, "which", lambda _: fake_ncu(tmp_path, f"{METRIC.split('.')[0]} cycles", rows)
    )
    found = tensor_core_counters.read_counters(BENCH / "gemm.py", JOBS, {}, 60)
    assert found == {"profiler": "ncu", "counter": METRIC, "percent": {"up torch": 91.5, "up kernel": 88.25}}


@pytest.mark.parametrize(
    "listing,rows,why",
    [
        ("sm__cycles_active", "", "lists none of"),
        (METRIC.split(".")[0], "==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
        (METRIC.split(".")[0], csv_of(("distribution_elementwise", "0"), ("a", "1.0")), "1 of 2 products"),
        (METRIC.split(".")[0], csv_of(("distribution_elementwise", "0"), ("a", "n/a")), "reads 'n/a'"),
    ],
)
def test_counters_that_cannot_be_read_say_why(tmp_path, monkeypatch, listing, rows, why):
    monkeypatch.setattr(tensor_core_counters.shutil, "which", lambda _: fake_ncu(tmp_path, listing, rows))
    monkeypatch.setattr(tensor_core_counters, "_by_torch", no_counters)
    found = tensor_core_counters.read_counters(BENCH / "gemm.py", JOBS, {}, 60)
    assert set(found) == {"unavailable"} and why in found["unavailable"] and "no counters" in found["unavailable"]


def no_counters(runs):
    raise tensor_core_counters.CountersUnavailable("torch.profiler: this build returns no counters")


def test_counters_in_a_trace_of_torch():
    events = [
        {"cat": "kernel", "args": {}},
        {"cat": "cuda_profiler_range", "args": {METRIC: 71.0, "other": 1}},
        {"cat": "cuda_profiler_range", "args": {"other": 1}},
    ]
    assert list(tensor_core_counters.trace_percentages({"traceEvents": events}, METRIC)) == [71.0]


def test_the_persistent_rival_takes_the_fast_path():
    """A rival that spills or misses the tensor cores would be easy to beat."""
    import persistent_rival as rival

    a, b, c = (torch.empty(size, device="meta", dtype=torch.bfloat16) for size in ((4096, 4096),) * 3)
    arguments = {"a": a, "b": b, "c": c, "M": 4096, "N": 4096, "K": 4096}
    launch = Launch(rival.persistent_kernel, arguments, rival.CONSTANTS, 132, rival.OPTIONS)
    compiled = aot.compile_launch(launch, "sm_90")
    assert all(word in compiled.asm["ptx"] for word in ("wgmma.mma_async", "cp.async.bulk.tensor"))
    assert aot.numbers(compiled, "sm_90")[0]["spills"] == 0 and compiled.metadata.shared <= H200.shared_bytes


@pytest.mark.filterwarnings("ignore::ndtp_kernels.errors.KernelFallback")
def test_products_of_experts_are_compared(monkeypatch):
    """All three, even and uneven; a kernel with wrong numbers is named and not timed."""
    monkeypatch.setattr(grouped_gemm, "time_in_turns", lambda runs, rounds: [[1e-6] for _ in runs])
    monkeypatch.setattr(grouped_gemm, "LAYERS", {"tiny": (4, 16, 24, 40)})
    report = grouped_gemm.measure(CPU, H200, contest.Deadline.after(100))
    rows = json.loads(json.dumps(report))["rows"]
    assert not report["failed"] and not any(row["failed"] for row in rows)
    assert [row["kind"] for row in rows] == [*grouped_gemm.KINDS] * 2 and all(sum(r["sizes"]) == 40 for r in rows)
    assert rows[0]["sizes"] == [10] * 4 and 0 in rows[3]["sizes"]
    assert all(row["against_loop"] == 1 and row["chosen"] in row["microseconds"] for row in rows)
    monkeypatch.setattr(grouped_gemm, "grouped_gemm", lambda a, b, *_, **__: a.new_zeros(40, 24))
    first = grouped_gemm.measure(CPU, H200, contest.Deadline.after(100))["rows"][0]
    assert list(first["microseconds"]) == ["loop"] and all("wrong numbers" in why for why in first["failed"].values())
