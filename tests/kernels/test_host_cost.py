"""bench/kernel_host_cost.py: what it takes for a repeated call is one."""

import sys
from pathlib import Path

import pytest
import torch
from ndtp_kernels import launch, prepared

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import kernel_host_cost as bench


@pytest.fixture(autouse=True)
def on_a_stub(monkeypatch):
    prepared.forget()
    bench.pretend(monkeypatch.setattr)
    yield
    prepared.forget()


@torch.no_grad()
def test_a_repeated_call_reads_and_chooses_nothing(monkeypatch):
    for run in bench.cases().values():
        run()
        with monkeypatch.context() as patch:
            patch.setattr(launch, "gemm_launches", None)
            patch.setattr(launch, "reduce_launch", None)
            run()
    kept = [each for each in prepared._known.values() if each.starts]
    assert len(kept) == len(prepared._known) == len(bench.cases())


def test_both_costs_are_measured():
    rows = bench.measure(repetitions=2, calls=8)
    assert set(rows) == set(bench.cases())
    assert all(row["least"] > 0 and row["first_least"] > 0 for row in rows.values())
