"""Every shipped configuration compiles for its target, without a device: see `ndtp_kernels.tools.aot`."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from ndtp_kernels.choice import roof, table
from ndtp_kernels.tools import aot


@pytest.fixture(scope="module")
def report():
    """One run for the file; a process of its own, without the interpreter's switch."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "ndtp_kernels.tools.aot", "--json", "-"],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["configurations"]


def test_every_shipped_configuration_is_there(report):
    shipped = sum(
        len(kinds)
        for by_dtype in table.shipped_table().candidates.values()
        for configs in by_dtype.values()
        for _, kinds in configs
    )
    assert len(report) == len(list(aot.cases())) > shipped
    assert {row["target"] for row in report} == set(aot.TARGETS)
    keys = {"kernel", "target", "config", "registers", "shared_bytes", "spills", "instructions"}
    assert all(set(row) == keys for row in report)
    whole = ("registers", "shared_bytes", "spills")
    assert all(isinstance(row[key], int) for row in report for key in whole)
    assert all(isinstance(row[key], str) for row in report for key in ("kernel", "target", "config"))
    assert all(
        row["instructions"] and set(row["instructions"]) <= set(aot.INSTRUCTIONS)
        for row in report
        if "gemm" in row["kernel"]
    )


def test_nothing_spills_and_shared_memory_suffices(report):
    limits = {target: aot.CHIPS[chip].shared_bytes for target, chip in aot.TARGETS.items()}
    for case, row in zip(aot.cases(), report, strict=True):
        assert row["spills"] == 0, row
        assert row["shared_bytes"] <= limits[row["target"]], row
        threads = case.config.num_warps * (64 if case.target == "gfx942" else 32)
        assert aot.occupancy(row["registers"], threads, row["shared_bytes"], case.target) >= 1, row


def test_the_bound_on_shared_memory_holds(report):
    """`fits` keeps a launch from failing: its bound must cover what the compiler really asked for."""
    for case, row in zip(aot.cases(), report, strict=True):
        if case.kind != "reduce":
            split = case.kind == "split"
            problem = aot.call_of(case).problem()
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
    large = aot.examine(aot.Case("sm_90", "bfloat16", "plain", table.Config("tma", 128, 256, 64, 5, 8)))
    assert any("shared memory" in failure for failure in large["failures"])
    spilling = aot.examine(aot.Case("sm_80", "bfloat16", "backward", table.Config("pointer", 128, 256, 32, 3, 8)))
    assert any("spills" in failure for failure in spilling["failures"])
    missing = aot.examine(aot.Case("sm_90", "bfloat16", "plain", table.Config("pointer", 32, 64, 64, 3, 4)))
    assert missing["failures"] == []  # too few rows for wgmma, and not said to have it
    assert "wgmma" not in missing["instructions"]
