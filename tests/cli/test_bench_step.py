"""`ndtp bench step`, as it is typed."""

import gc
import json
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

from ndtp.cli import bench_step
from ndtp.measure import rivals, step
from ndtp.measure.step import StepJob, _stepper, count_wrong_of_rival, ranks_of, read_log, turns
from ndtp.measure.volume import BlockShape

TINY = ("--tokens", "64", "--hidden", "16", "--ffn", "32", "--warmup", "1")


def test_grids_and_rivals_in_one_run(ndtp):
    words = ("--ranks", "4", "--rounds", "2", "--compare", "torch", "--compare", "megatron", "--json", "-")
    code, out, err = ndtp("bench", "step", *TINY, *words)
    assert code == 0
    assert max(map(cell_len, err.splitlines())) <= 100
    result = json.loads(out)
    rows = {row["name"]: row for row in result["rows"]}
    assert {"z=2 y=2", "y=4", "torch Colwise/Rowwise", "torch sequence parallel", "Megatron-style 1D"} <= set(rows)
    assert all(row["rounds"] == 2 and row["wrong"] == 0 and row["step_ms"] > 0 for row in rows.values())
    assert rows["y=4"]["received_bytes"] == 4 * 4 * 64 * 16 * 3 / 4 == rows["Megatron-style 1D"]["received_bytes"]
    planned = [row for row in rows.values() if row["predicted_ms"]]
    assert sorted(row["planner_rank"] for row in planned) == list(range(1, len(planned) + 1))
    for row in planned:
        assert row["exposed_ms"] == pytest.approx(max(0, row["step_ms"] - row["local_ms"]))


def test_nobody_comes_behind_the_same_step_in_every_round():
    rounds = [turns(range(5), i) for i in range(-2, 15)]
    assert all(sorted(order) == list(range(5)) for order in rounds)
    before_the_last = {order[order.index(4) - 1] for order in rounds if order.index(4)}
    assert before_the_last == set(range(4)) and {order[0] for order in rounds} == set(range(5))


def test_a_wrong_result_exits_1_and_is_not_timed(ndtp, monkeypatch):
    def run(job, ranks):
        entries = [{"name": str(case), "received_bytes": 1, "wrong": 3} for case in job.cases]
        Path(job.log).write_text(json.dumps({"entries": entries, "rounds": 1}) + "\n")

    monkeypatch.setattr(bench_step, "_run", run)
    code, out, _ = ndtp("bench", "step", *TINY, "--ranks", "4", "--grid", "y=4", "--json", "-")
    assert code == 1
    assert json.loads(out)["rows"][0]["step_ms"] is None


def broken_rival() -> tuple[int, int]:
    """Wrong elements of the Megatron-style layer, as it is and without the all-reduce of its output."""
    job = StepJob((), BlockShape(64, 16, 32), "float32", 1, 0, (), "")
    right = count_wrong_of_rival("Megatron-style 1D", job)
    forward, rivals.SumOut.forward = rivals.SumOut.forward, staticmethod(lambda ctx, y: y.clone())
    try:
        return right, count_wrong_of_rival("Megatron-style 1D", job)
    finally:
        rivals.SumOut.forward = forward


def test_rivals_are_checked_against_dense(ranks):
    results = ranks(2).run(broken_rival)
    assert all(right == 0 and wrong > 0 for right, wrong in results)


def in_flight_after_a_step() -> tuple[int, int]:
    """Collectives that nobody has waited for, after a forward and backward alone, and after a step that is timed."""
    in_flight = torch._C._distributed_c10d._get_work_registry_size
    gc.collect()
    before = in_flight()  # of other tests on the same ranks
    block = rivals.RIVALS["torch sequence parallel"][0](rivals.DenseBlock(16, 32, torch.float32, "cpu"), "cpu")
    x = torch.randn(32, 16, requires_grad=True)
    y = block(x)
    y.backward(torch.randn(32, 16))
    alone = in_flight() - before
    rivals.wait_until_there(y, x.grad)
    _stepper(block, x)()
    return alone, in_flight() - before


def test_the_clock_stops_when_the_results_are_there(ranks):
    assert ranks(2).run(in_flight_after_a_step) == [(2, 0)] * 2


def test_log_with_a_line_that_was_being_written(tmp_path):
    log = tmp_path / "log"
    entries = [{"name": "y=2", "received_bytes": 10, "wrong": 0}]
    times = ((-1, 99.0), (0, 3.0), (1, 5.0), (2, 4.0))
    rounds = [{"round": i, "step_ms": [ms], "host_ms": [ms / 2], "local_ms": [1.0]} for i, ms in times]
    lines = [json.dumps(line) for line in ({"entries": entries, "rounds": 9}, *rounds)]
    log.write_text("\n".join(lines) + '\n{"round": 3, "st')
    (result,) = read_log(log)
    assert (result.rounds, result.step_ms, result.slowest_ms, result.exposed_ms) == (3, 4.0, 5.0, 3.0)
    assert result.host_ms == 2.0
    assert read_log(tmp_path / "none") == []


def test_several_steps_between_two_waits(monkeypatch):
    """What is timed is one of them, until the device is done and until the host is; the barrier is before the first."""
    seen, clock = [], iter((1.0, 9.0, 13.0))
    monkeypatch.setattr(step.dist, "barrier", lambda: seen.append("barrier"))
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(clock))
    job = StepJob((), BlockShape(64, 16, 32), "float32", 1, 0, (), "", together=4)
    assert step._timed(lambda: seen.append("step"), job) == (3000.0, 2000.0)
    assert seen == ["barrier", *["step"] * 4]


def test_ranks_of():
    assert ranks_of([3.0, None, 1.0, 2.0]) == [3, None, 1, 2]


def test_named_grids():
    shape = BlockShape(64, 16, 32)
    (case,) = bench_step.choose(["z=2, x=2 y=2"], 8, shape, 1)
    assert (str(case), case.scheme) == ("z=2 x=2 y=2", "3d")
    assert [case.scheme for case in bench_step.choose(["x=8", "y=8"], 8, shape, 1)] == ["2d", "1d-sp"]
    (case,) = bench_step.choose(["dp=2 y=4"], 8, shape, 1)
    assert (str(case), case.scheme) == ("dp=2 y=4", "1d-sp")


@pytest.mark.parametrize(
    "words, message",
    [
        (("--ranks", "4", "--grid", "q=4"), "write it like z=2,x=2,y=2; axes: dp z x y"),
        (("--ranks", "4", "--grid", "y=8"), "has 8 ranks, the run has 4; fix: --ranks 8"),
        (("--ranks", "7"), "multiples of 7"),
        (("--ranks", "1"), "--ranks 2 or more"),
        (("--compare", "jax"), "'jax'; it must be one of torch, megatron"),
        (("--dtype", "int8"), "'int8'; it must be one of fp32, bf16, fp16"),
        (("--hardware", "cpus"), "did you mean cpu"),
        (
            ("--ranks", "8", "--grid", "x=8", "--hidden", "12"),
            "8 does not divide 12\n  fix: --hidden 16, or another --grid",
        ),
        (("--grid", "x=3"), "3 does not divide 16\n  fix: --tokens 66 --hidden 18 --ffn 33, or another --grid"),
    ],
)
def test_wrong_use(ndtp, words, message):
    code, _, err = ndtp("bench", "step", *TINY, *words)
    assert code == 2 and message in err


def test_help_has_an_example(ndtp):
    code, out, _ = ndtp("bench", "step", "--help")
    assert code == 0 and "Example: ndtp bench step" in out
