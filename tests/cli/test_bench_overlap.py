"""`ndtp bench overlap`, as it is typed: the trace holds the plan's collectives, once a chunk, on every rank."""

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from launched import launch
from rich.cells import cell_len
from turns import by_turns

from ndtp.algebra.grid import Grid
from ndtp.algebra.schemes import block_layouts
from ndtp.cli import bench_overlap
from ndtp.collectives.recorder import Span
from ndtp.measure.overlap_trace import RankTrace, lanes, merged, total
from ndtp.measure.volume import BlockShape

TINY = ("--tokens", "64", "--hidden", "16", "--ffn", "32", "--rounds", "2", "--warmup", "1")
BENCH = Path(__file__).parent.parent.parent / "bench"


def planned(grid: Grid, scheme: str) -> set[tuple[str, str, str]]:
    """(title without chunk, phase, axes) of every collective of a block with biases."""
    plans = block_layouts(grid, scheme).plans("mlp")
    return {
        (f"{step.kind}[{' '.join(step.axes)}] mlp.{layer} {move.tensor}", move.phase, " ".join(step.axes))
        for layer, plan in zip(("up", "down"), plans, strict=True)
        for move in plan.moves(bias=True)
        for step in move.steps
        if step.kind != "slice"
    }


def check_trace(text: str, grid: Grid, scheme: str, chunks: int) -> None:
    events = json.loads(text)["traceEvents"]
    assert {event["pid"] for event in events} == set(range(grid.num_ranks))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    for rank in range(grid.num_ranks):
        parts = defaultdict(list)
        for event in spans:
            if event["pid"] == rank and event["cat"] == "collective":
                assert names[rank, event["tid"]] == f"axis {event['args']['axes']}"
                part = re.search(r" (\d+/\d+)", event["name"])
                title = event["name"].replace(part[0], "", 1) if part else event["name"]
                parts[title, event["args"]["phase"], event["args"]["axes"]].append(part[1] if part else "whole")
        assert set(parts) == planned(grid, scheme)
        cut = [f"{i + 1}/{chunks}" for i in range(chunks)]
        assert all(sorted(found) in (cut, ["whole"]) for found in parts.values()), parts
        assert any(sorted(found) == cut for found in parts.values()), "nothing was cut"
        products = {event["name"] for event in spans if event["pid"] == rank and names[rank, event["tid"]] == "compute"}
        assert {f"gemm C {part} mlp.up" for part in cut} <= products
    by_lane = defaultdict(list)
    for event in spans:
        by_lane[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane, times in by_lane.items():
        rounding = 0.002
        assert all(one[1] <= other[0] + rounding for one, other in pairwise(sorted(times))), f"{names[lane]} overlaps"


@pytest.mark.parametrize("grid, scheme", by_turns([("z=2 y=2", "3d"), ("x=2 y=2", "2d")], 2))
def test_every_collective_of_the_plan_on_every_rank(ndtp, tmp_path, grid, scheme):
    trace, plot, words = tmp_path / "trace.json", tmp_path / "timeline.png", ("--chunks", "2", "--json", "-")
    code, out, err = ndtp("bench", "overlap", *TINY, "--grid", grid, "--trace", trace, "--plot", plot, *words)
    assert code == 0, err
    assert max(map(cell_len, err.replace(str(tmp_path), "").splitlines())) <= 100
    result = json.loads(out)
    assert (result["scheme"], result["ranks"], result["chunks"], result["wrong"]) == (scheme, 4, 2, 0)
    for row in result["rows"]:
        parts = row["compute_ms"] + row["exposed_ms"] + row["other_ms"]
        assert parts == pytest.approx(row["step_ms"], rel=1e-6), "a rank computes, waits, or neither"
        assert 0 <= row["hidden_fraction"] <= 1 and row["in_flight_ms"] > 0
    check_trace(trace.read_text(), bench_overlap.grid_of(grid), scheme, 2)
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


def test_paced_steps_are_checked_and_told_by_phase(ndtp, tmp_path):
    """Bytes, order and handles as ever, and as much time for local work as was asked for."""
    sizes = (*TINY, "--chunks", "2")
    words = ("--paced", "--blocks", "2", "--balance", "2", "--grid", "z=2 y=2", "--trace", tmp_path / "trace.json")
    code, out, err = ndtp("bench", "overlap", *sizes, *words, "--json", "-")
    assert code == 0, err
    result = json.loads(out)
    phases = result["phases_ms"].values()
    worked, moved = (sum(phase[name] for phase in phases) for name in ("products", "communication"))
    assert result["wrong"] == [] and worked == pytest.approx(2 * moved)
    assert result["bound_ms"] == pytest.approx(sum(max(each["products"], each["communication"]) for each in phases))
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"gemm C 1/2 mlp1.up", "all_gather[z] mlp1.down B"} <= names
    code, _, err = ndtp("bench", "overlap", *sizes, *words[:3], "--balance", "0")
    assert code == 2 and "--balance 0 is not a ratio" in err


LAUNCHED = ("-m", "ndtp", "bench", "overlap", *TINY, "--grid", "y=2", "--chunks", "2", "--trace")


def check_launched(printed: str, trace: Path) -> None:
    """Under a launcher rank 0 alone prints and writes."""
    assert printed.count("1d-sp on y=2") == 1, printed
    check_trace(trace.read_text(), Grid(z=1, x=1, y=2), "1d-sp", 2)


def test_under_torchrun(ranks, tmp_path):
    trace = tmp_path / "trace.json"
    check_launched("".join(launch(ranks(2), *LAUNCHED, trace)), trace)


def networks() -> str:
    """All network namespaces and links of the machine: others may come and go meanwhile."""
    words = (("ip", "netns", "list"), ("ip", "-brief", "link"))
    return "".join(subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in words)


def missing() -> str | None:
    sys.path.insert(0, str(BENCH))
    try:
        from slow_network import requirements
    finally:
        sys.path.remove(str(BENCH))
    return requirements()


BEHIND_A_LINK = """
import os, pathlib, runpy, subprocess

try:
    runpy.run_module("ndtp", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code

import torch, torch.distributed as dist

dist.all_reduce(torch.ones(2**16))
dist.barrier()
sent = int(pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
own = subprocess.run(["ip", "netns", "identify"], capture_output=True, text=True).stdout.strip()
is_there = own in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
print(os.environ["WORLD_SIZE"], sent > 2**18, is_there, own)
"""


@pytest.mark.skipif(missing() is not None, reason=f"network namespaces: {missing()}")
def test_behind_slow_links(tmp_path):
    """Processes of a launcher; it counts on its links, and leaves nothing behind."""
    trace = tmp_path / "trace.json"
    words = ("--ranks", 2, "--rate", "200mbit", "--", sys.executable, "-c", BEHIND_A_LINK, *LAUNCHED[2:], trace)
    done = subprocess.run(
        [sys.executable, str(BENCH / "slow_network.py"), *map(str, words)],
        check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    check_launched(done.stdout, trace)
    *found, own = done.stdout.splitlines()[-1].split()
    assert found == ["2", "True", "True"] and own.endswith("n0")
    deadline = time.monotonic() + 30  # the kernel takes the links of a namespace down a little after it
    while own.removesuffix("n0") in networks():
        assert time.monotonic() < deadline, networks()
        time.sleep(0.05)


def test_a_wrong_result_exits_1_and_is_not_timed(ndtp, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_overlap, "_run", lambda job: [RankTrace(i, {"y": i}, 3) for i in range(4)])
    code, out, err = ndtp("bench", "overlap", *TINY, "--trace", tmp_path / "trace.json", "--json", "-")
    assert code == 1 and "3 elements differ" in " ".join(err.split())
    assert json.loads(out)["rows"] == [] and not list(tmp_path.iterdir())


def flight(start: float, end: float, **changes: object) -> Span:
    return Span(
        **{"kind": "collective", "name": "f", "phase": "forward", "axes": ("x",), "start": start, "end": end} | changes
    )


def test_the_numbers_of_a_rank():
    spans = (
        flight(0.0, 3.0), flight(1.0, 4.0), flight(4.0, 5.0, axes=("y",)), flight(7.0, 9.0),
        flight(0.0, 2.0, kind="compute"), flight(2.0, 3.5, kind="wait"), flight(8.0, 10.0, kind="wait"),
    )  # fmt: skip
    trace = RankTrace(5, {"x": 1}, 0, 12.0, spans)
    summary = trace.summary
    times = [summary[key] for key in ("compute_ms", "in_flight_ms", "exposed_ms", "other_ms")]
    assert times == [2000, 7000, 3500, 6500]
    assert summary["hidden_fraction"] == pytest.approx(1 - 2.5 / 7)
    assert [(name, [span.start for span in found]) for name, found in lanes(trace)] == [
        ("compute", [0.0, 2.0, 8.0]), ("axis x", [0.0, 7.0]), ("axis x", [1.0]), ("axis y", [4.0]),
    ]  # fmt: skip
    assert RankTrace(0, {}, 0, 1.0).summary["hidden_fraction"] is None


def test_merged():
    assert merged([(3, 4), (0, 2), (1, 2.5), (2.5, 2.75)]) == [(0, 2.75), (3, 4)]
    assert total(merged([(0, 2), (1, 3)])) == 3


def test_grids_and_schemes():
    shape = BlockShape(64, 16, 32)
    choose = bench_overlap.choose
    assert choose("z=2 y=2", None, None, shape).scheme == "3d"
    assert choose("y=4", "2d-features", None, shape).scheme == "2d-features"
    assert choose(None, "2d", 4, shape).scheme == "2d"
    assert choose(None, None, 8, shape).grid.num_ranks == 8


@pytest.mark.parametrize(
    "words, message",
    [
        (("--chunks", "0"), "--chunks 0 is neither a number from 1 to 1024 nor auto"),
        (("--chunks", "many"), "--chunks many is neither a number"),
        (("--grid", "q=4"), "--grid: 'q=4': 'q=4' is not an axis and its size; write it like"),
        (("--ranks", "4", "--grid", "y=8"), "has 8 ranks, the run has 4; fix: --ranks 8"),
        (("--ranks", "1"), "--ranks 2 or more"),
        (("--scheme", "4d"), "4d"),
        (("--grid", "y=4", "--scheme", "4d"), "'4d'; it must be one of 1d, 1d-sp"),
        (("--grid", "z=2 y=2", "--scheme", "2d"), "scheme '3d'"),
        (("--dtype", "int8"), "'int8'; it must be one of fp32, bf16, fp16"),
        (("--rounds", "0"), "'--rounds': 0; it must be an integer from 1 to 1,000,000"),
        (("--trace", "/nowhere/trace.json"), "the folder /nowhere does not exist"),
        (("--grid", "x=4 y=2", "--hidden", "18"), "4 does not divide 18\n  fix: --hidden 24, or another --grid"),
    ],
)
def test_wrong_use(ndtp, words, message):
    code, _, err = ndtp("bench", "overlap", *TINY, *words)
    assert code == 2 and message in err, err


def test_help_has_an_example(ndtp):
    code, out, _ = ndtp("bench", "overlap", "--help")
    assert code == 0 and "Example: ndtp bench overlap" in out
