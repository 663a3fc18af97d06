"""What the compiler makes of shipped configurations, without a device: see `ndtp_kernels.tools.aot`.

Here a quick look at each kind; `make kernels` compiles all of them.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from ndtp_kernels.choice import roof, table
from ndtp_kernels.choice.problem import Config
from ndtp_kernels.tools import aot, cases, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
CASES = list(cases.quick_cases())


@pytest.fixture(scope="module")
def report():
    """One run for the file; a process of its own, without the interpreter's switch."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "ndtp_kernels.tools.aot", "--quick", "--json", "-"],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["configurations"]


def test_every_kind_of_every_target_is_looked_at(report):
    assert len(report) == len(CASES)
    assert {row["target"] for row in report} == set(cases.TARGETS)
    assert {case.kind for case in CASES if case.target == "sm_90"} == {case.kind for case in cases.cases(("sm_90",))}
    assert all(set(row) == set(aot.REPORTED) for row in report)
    assert all(isinstance(row[key], int) for row in report for key in aot.NUMBERS)
    assert all(isinstance(row[key], str) for row in report for key in ("kernel", "target", "config"))
    gemms = [row for row in report if "gemm" in row["kernel"]]
    assert all(row["instructions"] and set(row["instructions"]) <= set(aot.INSTRUCTIONS) for row in gemms)
    assert all(row["epilogue"] > 0 for row in gemms)
    assert not any(row["warnings"] for row in report)


def test_the_page_shows_every_configuration_as_it_compiles(report):
    """All shipped ones are there; where this Triton made the table, with the very numbers."""
    version, shown = page.lines(PAGE)
    assert list(shown) == list(cases.TARGETS)
    for target, lines in shown.items():
        named = [line.split(" | ")[:2] for line in lines]
        wanted = [[f"| {cases.name_of(case)}", cases.shown(case)] for case in cases.cases((target,))]
        assert named == wanted, "python -m ndtp_kernels.tools.aot --page docs/kernels.md"
    if version == triton.__version__:
        for row in report:
            assert page.line(row) in shown[row["target"]], "python -m ndtp_kernels.tools.aot --page docs/kernels.md"


def test_nothing_spills_and_shared_memory_suffices(report):
    limits = {target: cases.CHIPS[chip].shared_bytes for target, chip in cases.TARGETS.items()}
    for case, row in zip(CASES, report, strict=True):
        assert row["spills"] == 0, row
        assert row["shared_bytes"] <= limits[row["target"]], row
        threads = case.config.num_warps * (64 if case.target == "gfx942" else 32)
        assert aot.occupancy(row["registers"], threads, row["shared_bytes"], case.target) >= 1, row


def test_the_bound_on_shared_memory_holds(report):
    """`fits` keeps a launch from failing: its bound must cover what the compiler really asked for."""
    for case, row in zip(CASES, report, strict=True):
        if case.kind != "reduce":
            split = case.kind == "split"
            problem = cases.problem_of(case)
            if split:  # fp32 sums, stored without staging
                problem = replace(problem, out_bytes=4)
            assert row["shared_bytes"] <= roof.shared_bytes(problem, case.config, case.chip), row
            assert split or table.fits(problem, case.config, case.chip), row
            assert split or case.kind == problem.kind, (row, problem)


def test_fast_paths_are_really_taken(report):
    """The instructions that make a configuration worth having."""

    def rows(target, kernel="tma", dtype="bfloat16"):
        of_target = [r for r in report if r["target"] == target and r["kernel"].endswith(dtype)]
        found = [r for r in of_target if r["config"].startswith(kernel)]
        assert found
        return found

    assert all({"wgmma", "tma"} <= set(r["instructions"]) for r in rows("sm_90"))
    assert all({"wgmma", "tma"} <= set(r["instructions"]) for r in rows("sm_90", dtype="float8_e4m3fn"))
    assert all({"tcgen05", "tma"} <= set(r["instructions"]) for r in rows("sm_100"))
    assert all({"mma", "cp.async"} <= set(r["instructions"]) for r in rows("sm_80", "pointer"))
    assert all("mfma" in r["instructions"] for r in rows("gfx942", "pointer"))
    blocks = [r for r in report if "blocks" in r["kernel"] and r["config"].startswith("pointer")]
    assert blocks and all("cp.async" in r["instructions"] for r in blocks)
    specialized = [r for r in report if "warp-specialized" in r["config"]]
    assert specialized and all("setmaxnreg" in r["instructions"] for r in specialized)


def test_registers_and_shared_memory_bound_the_occupancy():
    """By hand: 255 registers x 256 threads fill an SM of 65536; 200 KiB leave room for one block."""
    assert aot.occupancy(255, 256, 1024, "sm_90") == 1
    assert aot.occupancy(128, 128, 1024, "sm_90") == 4
    assert aot.occupancy(32, 128, 200 << 10, "sm_90") == 1
    assert aot.occupancy(256, 256, 1024, "sm_90") == 1 and aot.occupancy(257, 256, 1024, "sm_90") == 0


def test_a_bad_configuration_is_found():
    """The checks can fail: too many stages, and too large a tile for its warps."""
    large = aot.examine(cases.Case("sm_90", "bfloat16", "plain", Config("tma", 128, 256, 64, 5, 8)))
    assert any("shared memory" in failure for failure in large["failures"])
    spilling = aot.examine(cases.Case("sm_80", "bfloat16", "backward", Config("pointer", 128, 256, 32, 3, 8)))
    assert any("spills" in failure for failure in spilling["failures"])
    slow = aot.examine(cases.Case("sm_90", "bfloat16", "plain", Config("tma", 128, 128, 64, 1, 8)))  # no pipeline
    assert slow["failures"] == ["waits for all wgmma 1 times in a step of K"]
    alike = aot.examine(
        cases.Case("sm_90", "bfloat16", "plain", Config("tma", 128, 128, 64, 5, 4, warp_specialize=True))
    )
    assert alike["failures"] == ["lacks setmaxnreg"]  # the compiler gives all warps the same work, without a word
    missing = aot.examine(cases.Case("sm_90", "bfloat16", "plain", Config("pointer", 32, 64, 64, 3, 4)))
    assert missing["failures"] == []  # too few rows for wgmma, and not said to have it
    assert "wgmma" not in missing["instructions"]


def test_a_kernel_that_is_flattened_wrongly_is_found():
    """Two products in one flattened loop: ptxas lets every wgmma wait for the one before, and says so."""
    gated = next(case for case in CASES if (case.target, case.dtype, case.kind) == ("sm_90", "bfloat16", "gated"))
    assert cases.launch_of(gated).constants["FLATTEN"] is False
    failures = aot.examine(gated, FLATTEN=True)["failures"]
    assert "ptxas expects it to be slow: C7515" in failures
    assert "waits for all wgmma 8 times in a step of K" in failures
