"""`ndtp.profile`: what each rank did in a step, as a table, a trace and a picture."""

import json

import pytest
import torch

import ndtp
from ndtp.measure.overlap_trace import phase_of


def profiled(folder):
    idle = ndtp.ProcessGrid(ndtp.Grid(y=2))
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=2))
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d-sp", name="mlp")
    shard = torch.randn(block.in_layout.shard_shape((8, 8)), requires_grad=True)
    calls = []

    def step():
        calls.append(1)
        block(shard).sum().backward()

    given = ndtp.profile(step, mesh)
    found = ndtp.profile(step, warmup=0)  # all grids of this process, that one among them
    assert found.traces[0].coordinate == given.traces[0].coordinate != idle.coordinate, "named by a grid at work"
    assert len(calls) == 3 and {span.name for span in found.traces[0].spans} == {
        span.name for span in given.traces[0].spans
    }
    given.save(f"{folder}/step.json")
    given.draw(f"{folder}/step.svg")
    return given


def test_every_rank_has_the_profile_of_all(ranks, tmp_path):
    first, second = ranks(2).run(profiled, str(tmp_path))
    assert first.traces == second.traces and [trace.rank for trace in first.traces] == [0, 1]
    for row in first.rows:
        assert 0 < row["compute_ms"] <= row["step_ms"] and row["in_flight_ms"] > 0
    lines = str(first).splitlines()
    assert lines[0].split()[0] == "rank" and [line.split(" (")[0] for line in lines[1:]] == ["rank 0", "rank 1"]
    assert first._repr_html_().count("<tr>") == 3
    events = [e for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    of_phase = {event["args"].get("phase") for event in events}
    assert {"forward", "dgrad", "wgrad"} <= of_phase and any("mlp.up" in event["name"] for event in events)
    assert "exposed wait" in (tmp_path / "step.svg").read_text() or (tmp_path / "step.svg").stat().st_size > 10_000


def test_phases_of_local_work():
    assert [phase_of(name) for name in ("gemm C 1/2 mlp.up", "gemm dB x", "gemm dA", "gelu")] == [
        "forward", "wgrad", "dgrad", "",
    ]  # fmt: skip


def test_a_program_without_a_grid_is_refused():
    with pytest.raises(ndtp.GridError, match="pass mesh="):
        ndtp.profile(lambda: None, [])
