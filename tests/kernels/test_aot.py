"""What the compiler makes of shipped configurations, without a device: see `ndtp_kernels.tools.aot`.

Here a quick look; `make kernels` compiles all of them, with the same checks.
"""

import json
from pathlib import Path

import pytest
import triton
from ndtp_kernels.choice import roof, table
from ndtp_kernels.choice.problem import Config
from ndtp_kernels.tools import aot, cases, page

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "kernels.md"
CASES = list(cases.quick_cases())


@pytest.fixture(scope="module")
def report():
    """One look for the file."""
    return [aot.examine(case) for case in CASES]


def test_what_was_compiled_is_reported(report, monkeypatch, capsys):
    assert len(report) == len(CASES) == len(cases.QUICK), "each way is that of a configuration"
    assert {row["target"] for row in report} == set(cases.TARGETS)
    assert not any(row["failures"] or row["warnings"] for row in report), report
    monkeypatch.setattr(aot, "report", lambda of, workers: report if of == CASES else None)
    assert aot.main(["--quick", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["configurations"]
    assert len(rows) == len(CASES)
    assert all(set(row) == set(aot.REPORTED) for row in rows)
    assert all(isinstance(row[key], int) for row in rows for key in aot.NUMBERS)
    assert all(isinstance(row[key], str) for row in rows for key in ("kernel", "target", "config"))
    gemms = [row for row in rows if "gemm" in row["kernel"]]
    assert all(row["instructions"] and set(row["instructions"]) <= set(aot.INSTRUCTIONS) for row in gemms)
    assert all(row["epilogue"] > 0 for row in gemms)


def test_make_kernels_compiles_and_compares_all_of_them():
    """What this file leaves to it: every kind of every target."""
    rule = (ROOT / "Makefile").read_text().partition("\nkernels:")[2].partition("\n\n")[0]
    assert "-m ndtp_kernels.tools.aot --compare docs/kernels.md\n" in rule + "\n"
    assert "\n\t$(MAKE) test kernels demo\n" in (ROOT / "Makefile").read_text().partition("\nci: $(DOCS)\n")[2]
    every = {case.kind for case in cases.cases()}
    assert every == {case.kind for case in cases.cases(("sm_90",))} > {case.kind for case in CASES}


def test_the_page_shows_every_configuration_as_it_compiles(report, monkeypatch, capsys):
    """All shipped ones are there; where this Triton made the table, with the very numbers."""
    version, shown = page.lines(PAGE)
    assert list(shown) == list(cases.TARGETS)
    for target, lines in shown.items():
        named = [line.split(" | ")[:2] for line in lines]
        wanted = [[f"| {cases.name_of(case)}", cases.shown(case)] for case in cases.cases((target,))]
        assert named == wanted, "python -m ndtp_kernels.tools.aot --page docs/kernels.md"
    assert page.other(PAGE, report) == [], "python -m ndtp_kernels.tools.aot --page docs/kernels.md"
    monkeypatch.setattr(triton, "__version__", version)
    another = {**report[0], "registers": 1, "failures": []}
    monkeypatch.setattr(aot, "report", lambda of, workers: [another])
    assert aot.main(["--compare", str(PAGE)]) == 1
    assert f"{PAGE} says otherwise" in capsys.readouterr().err
    monkeypatch.setattr(triton, "__version__", "0")
    assert page.other(PAGE, [another]) == [], "another compiler, other numbers"


def test_every_configuration_is_chosen_for_what_it_is_compiled_for():
    for case in cases.cases():
        if case.kind != "split" and not case.is_pass:
            problem = cases.problem_of(case)
            assert table.fits(problem, case.config, case.chip), case
            assert case.kind == problem.kind, case


def test_fast_paths_are_really_taken(report):
    """The instructions that make a configuration worth having."""

    def rows(target, kernel="tma"):
        of_target = [r for r in report if r["target"] == target and r["kernel"].endswith("bfloat16")]
        found = [r for r in of_target if r["config"].startswith(kernel)]
        assert found
        return found

    assert all({"wgmma", "tma"} <= set(r["instructions"]) for r in rows("sm_90"))
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


def test_a_bad_configuration_is_found(monkeypatch):
    """The checks can fail: too many stages, and too large a tile for its warps."""
    large = aot.examine(cases.CompiledCase("sm_90", "bfloat16", "plain", Config("tma", 128, 128, 64, 8, 8)))
    assert large["failures"] == ["shared memory 294976 > 232448"]
    spilling = aot.examine(cases.CompiledCase("sm_80", "bfloat16", "backward", Config("pointer", 128, 128, 32, 3, 4)))
    assert any("spills" in failure for failure in spilling["failures"])
    slow = aot.examine(
        cases.CompiledCase("sm_90", "bfloat16", "plain", Config("tma", 128, 128, 64, 1, 8))
    )  # no pipeline
    assert slow["failures"] == ["waits for all wgmma 1 times in a step of K"]
    monkeypatch.setattr(roof, "shared_bytes", lambda *_: 1)  # too little: launches would fail
    monkeypatch.setattr(aot, "occupancy", lambda *_: 0)
    alike = aot.examine(
        cases.CompiledCase("sm_90", "bfloat16", "plain", Config("tma", 128, 128, 64, 5, 4, warp_specialize=True))
    )
    lacking, bound, registers = alike["failures"]
    assert lacking == "lacks setmaxnreg"  # the compiler gives all warps the same work, without a word
    assert "> 1, the bound that launches are chosen by" in bound and "no block of 128 threads" in registers
    monkeypatch.undo()
    missing = aot.examine(cases.CompiledCase("sm_90", "bfloat16", "plain", Config("pointer", 32, 64, 64, 3, 4)))
    assert missing["failures"] == []  # too few rows for wgmma, and not said to have it
    assert "wgmma" not in missing["instructions"]
