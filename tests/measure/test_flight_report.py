"""Records of ranks, compared: who was behind, who was elsewhere, who left none."""

import errno
import gc
import json
import os
import resource
from pathlib import Path

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace
from typer.testing import CliRunner

from ndtp.cli.app import app
from ndtp.collectives.flight import DONE, LENGTH, WAITED, Flight, Note
from ndtp.measure.flight_records import FlightError, read_flights
from ndtp.measure.flight_report import report

RANKS = (0, 1, 2)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "pass_on", "making")


def note(op):
    return Note((op,), "forward", "all_gather", ("x",), "", RANKS, 4)


def flights(folder, steps):
    """The record of each rank, of as many collectives; one that has more than all others waits in its last."""
    for rank, ops in steps.items():
        flight = Flight(rank, len(RANKS))
        for i, op in enumerate(ops):
            entry = flight.start(note(op), 16)
            entry[WAITED] = 1.0
            entry[DONE] = 2.0 if i + 1 < len(ops) else 0.0
        assert flight.write("test", str(folder))


def test_what_cannot_be_written_hides_no_failure(tmp_path):
    """On a full disk nothing of a record is left, and one that was there stays."""
    (tmp_path / "file").touch()
    assert Flight(0, 1).write("test", str(tmp_path / "file" / "below")) is None
    (tmp_path / "full").mkdir()
    assert Flight(0, 1).write("before", str(tmp_path / "full"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))  # a write fails in its middle; Python ignores SIGXFSZ
    try:
        assert Flight(0, 1).write("test", str(tmp_path / "full")) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["flight_0.json"]
    assert read_flights(tmp_path / "full")[0].reason == "before"


def test_who_is_behind(tmp_path):
    """Rings that have overflowed by different amounts are compared by what is counted, not by where it lies."""
    many = ["mlp.up"] * (LENGTH + 5)
    flights(tmp_path, {0: [*many, "head"], 1: many})
    found = report(read_flights(tmp_path))
    assert found.missing == [2] and not found.differing
    assert [(each["rank"], each["by"]) for each in found.behind] == [(1, 1)]
    assert "head" in found.behind[0]["lacks"]
    shown = CliRunner().invoke(app, ["info", "--flight", str(tmp_path)])
    assert shown.exit_code == 0 and "behind: rank 1 had not started all_gather of head" in shown.stdout
    assert "no record of rank 2" in shown.stdout


def test_where_ranks_disagree(tmp_path):
    flights(tmp_path, {0: ["a", "b", "c"], 1: ["a", "c", "b"], 2: ["a", "b", "c"]})
    (differing,) = report(read_flights(tmp_path)).differing
    assert differing["number"] == 2 and "of c " in differing["by rank"][1] and "of b " in differing["by rank"][0]


def for_torch(folder, steps):
    """The records of ranks that are in step, but for one that has not come to the last collective."""
    for rank in RANKS:
        flight = Flight(rank, len(RANKS))
        for i in range(steps):
            for kind in (
                ("all_reduce", "pass_on", "reduce_scatter", "all_gather", "making") if i < 2 else ["all_gather"]
            ):
                flight.start(Note(("mlp.up",), "forward", kind, ("x",), "", RANKS, 4), 16)[DONE] = 1.0
            if i >= 2 and rank == 0:  # its ring holds fewer of the others
                flight.start(Note(("alone",), "forward", "all_gather", ("y",), "", (0,)), 0)[DONE] = 1.0
        if rank < 2:
            flight.start(Note(("m",), "forward", ("send", "receive")[rank], ("pp",), "", (0, 1)), 8)[DONE] = 1.0
        if rank != 1:
            flight.start(Note(("head",), "forward", "all_gather", ("x",), "", RANKS), 16)[WAITED] = 1.0
        assert flight.write("test", str(folder))


def failing_at(nth, real):
    """A call whose n-th time finds a full disk."""
    count = 0

    def call(*args):
        nonlocal count
        count += 1
        if count == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    return call


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's analyser reads records of NCCL alone before 2.13")
@pytest.mark.parametrize("steps", [2, LENGTH + 5], ids=["whole", "overflowed"])
def test_torch_reads_them(steps, tmp_path, caplog, monkeypatch):
    """Its analyser finds the rank that is behind, also where rings have overflowed by different amounts."""
    for_torch(tmp_path, steps)
    asked = ["info", "--flight", str(tmp_path), "--torch", str(tmp_path / "out")]
    for place, name in ((Path, "write_bytes"), (os, "replace")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, failing_at(2, getattr(place, name)))
            assert "cannot be written: No space left" in CliRunner().invoke(app, asked).stderr.replace("\n", " ")
        assert not list((tmp_path / "out").iterdir()), "half a set, which refuses the next try"
    assert "3 records written" in CliRunner().invoke(app, asked).stdout
    try:
        fr_trace.main([str(tmp_path / "out")])
    finally:
        gc.enable()  # which reading has switched off
    assert caplog.text.count("Not all ranks joining collective") == 1 and "has errors" not in caplog.text, caplog.text
    assert "missing ranks: {1}" in caplog.text and "all_gather of head (forward) over axis x, 16 bytes" in caplog.text
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 2 and "is there already" in again.stderr
    assert CliRunner().invoke(app, [*asked[:-1], "/proc/none"]).exit_code == 2
    assert CliRunner().invoke(app, ["info", "--torch", "out"]).exit_code == 2


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(FlightError, match="has no flight_RANK"):
        read_flights(tmp_path)
    with pytest.raises(FlightError, match="File name too long"):
        read_flights(tmp_path / ("n" * 5000))
    path, entry = tmp_path / "flight_0.json", {
        "number": 0, "of its group": 1, "op": "up", "phase": "forward", "kind": "all_gather", "axes": ["x"], "part": "",
        "ranks": [0, 1], "bytes": 64, "started": 1.0, "waited": 2.0, "done": None,
    }  # fmt: skip
    record = {"rank": 0, "world_size": 2, "reason": "", "collectives": [entry]}
    path.write_text(json.dumps(record))
    assert read_flights(tmp_path)[0].collectives[0].as_json() == entry
    assert json.loads(CliRunner().invoke(app, ["info", "--flight", str(tmp_path), "--json", "-"]).stdout)[
        "unfinished"
    ] == {"0": [entry]}
    wrong = [
        {"ranks": [1, 2]}, {"ranks": ["0", "1"]}, {"ranks": []}, {"ranks": [0, 0]}, {"ranks": [0, True]},
        {"ranks": [0], "kind": "send"}, {"ranks": [0, 2]}, {"of its group": "1"}, {"of its group": 0}, {"bytes": 1.5},
        {"bytes": 10**400}, {"axes": "x"}, {"axes": [1]}, {"op": None}, {"op": "\ud800"}, {"op": "\x1b[2J"},
        {"waited": "1"}, {"done": float("nan")}, {"started": 1e300},
    ]  # fmt: skip
    records = [record | {"collectives": [entry | each]} for each in wrong]
    records += [record | {"collectives": [{k: v for k, v in entry.items() if k != name}]} for name in entry]
    records += [record | each for each in ({"rank": float("inf")}, {"rank": 2}, {"world_size": 2**40})]
    records += [record | each for each in ({"collectives": {}}, {"collectives": [7]}, {"rank": None})]
    texts = [json.dumps(each) for each in (*records, [], None, 7)]
    for text in (*texts, "{", "[" * 200_000):
        path.write_text(text)
        with pytest.raises(FlightError, match=r"flight_0\.json is no record of collectives"):
            read_flights(tmp_path)
    assert CliRunner().invoke(app, ["info", "--flight", str(tmp_path)]).exit_code == 2
    path.write_text(json.dumps(record))
    (tmp_path / "flight_1.json").write_text(json.dumps(record))
    with pytest.raises(FlightError, match="another file has rank 0"):
        read_flights(tmp_path)
    path.unlink()
    os.mkfifo(path)  # which is not waited for
    with pytest.raises(FlightError, match="no regular file"):
        read_flights(tmp_path)
