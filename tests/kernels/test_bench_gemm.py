"""The benchmark's own arithmetic, on a CPU: shapes, checks, verdicts.  Its timings need a GPU."""

import importlib.util
from pathlib import Path

import pytest
import torch
from ndtp_kernels.workloads import workload

ROOT = Path(__file__).resolve().parents[2]
specification = importlib.util.spec_from_file_location("bench_gemm", ROOT / "bench" / "gemm.py")
bench = importlib.util.module_from_spec(specification)
specification.loader.exec_module(bench)


def test_shapes_cover_whole_and_sharded_projections():
    found = list(bench.products(quick=False))
    shapes = {(m, n, k) for _, m, n, k in found}
    assert (8192, 14336, 4096) in shapes  # 8B up, whole
    assert (4096, 7168, 2048) in shapes  # the same on 2x2x2
    assert (8192, 3584, 2048) in shapes  # and on 1x4x2
    assert len(found) == len(shapes)


def test_wrong_numbers_end_the_benchmark():
    work = workload("plain", 16, 24, 32, dtype=torch.bfloat16, device=torch.device("cpu"))
    want = work.expected()
    bench.check("right", work, work.eager, want)
    with pytest.raises(SystemExit, match="wrong numbers"):
        bench.check("wrong", work, lambda: work.eager() * 1.2, want)
    with pytest.raises(SystemExit, match="wrong numbers"):
        bench.check("nan", work, lambda: work.eager() * float("nan"), want)


def test_verdicts_hold_the_goals():
    """A geometric mean at the goal with one product below the floor is a miss."""
    rows = [{"kind": "plain", "against_torch": ratio} for ratio in (1.2, 1.1, 0.9)]
    (goal,) = bench.verdicts(rows)
    assert goal["mean"] > 1 and not goal["met"]
    (goal,) = bench.verdicts(rows[:2])
    assert goal["met"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_claimed(capsys):
    assert bench.main(["--all"]) == 2
    assert "nothing was measured" in capsys.readouterr().err


def test_time_that_runs_out_is_reported():
    deadline = bench.Deadline(-1)
    assert bench.plain(torch.device("cpu"), True, deadline) == []
    assert deadline.skipped
