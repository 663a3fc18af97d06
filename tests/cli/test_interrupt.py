"""Ctrl-C: every command that starts ranks ends at once, and leaves none of them behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import with_torch

from ndtp.measure.step import num_rounds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def processes_of(session):
    """Those that started in it: ranks lead groups of their own, and no session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its, *_ = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if state != "Z" and int(its) == session:
            found.append(int(path.name))
    return found


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def four_ranks(folder, session):
    """The command, the process that forks the ranks, and these."""
    return len(processes_of(session)) >= 6


def interrupted(words, folder, is_running=four_ranks, number=signal.SIGINT):
    """Exit status, stdout and stderr of a command that gets Ctrl-C while it runs, or SIGTERM as all processes do."""
    return with_torch(interrupt, words, folder, is_running, number, timeout=250)


def interrupt(words, folder, is_running, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "ndtp", *words],
        env=dict(os.environ, TMPDIR=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: is_running(folder, process.pid) or process.poll() is not None, 120)
        assert process.poll() is None, process.communicate()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:  # of a service, or of a job of Slurm's: also those that lead groups of their own
            for pid in processes_of(process.pid):
                os.kill(pid, number)
        out, err = process.communicate(timeout=60)
        assert wait_until(lambda: not processes_of(process.pid), 30), "processes are left behind"
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in err
    return process.returncode, out, err


@pytest.mark.parametrize("words", ["demo --steps 1000 --output demo", "bench overlap --rounds 100000"])
def test_ctrl_c_leaves_no_rank_behind(words, tmp_path, monkeypatch):
    """A command that calls its ranks many times, under a bar with a thread of its own, and one that calls them once."""
    monkeypatch.chdir(tmp_path)
    status, _, _ = interrupted([*words.split(), "--ranks", "4"], tmp_path)
    assert status == 130


@pytest.mark.parametrize(
    "words",
    [
        "check --scheme 1d",
        "demo --steps 1000 --output demo",
        "bench calibrate --repeats 1000 --output mine.toml",
        "bench overlap --rounds 100000",
        "bench volume --tokens 4096",
    ],
)
def test_every_command_that_starts_ranks_ends_at_once(ndtp, words, tmp_path, monkeypatch):
    """Ctrl-C while ranks run: the call of them has ended them by then, as test_pool.py holds."""

    def run(*_, **__):
        calls.append(words)
        raise KeyboardInterrupt

    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ndtp.testing.run", run)
    status, _, err = ndtp(*words.split(), "--ranks", "4")
    assert (status, calls) == (130, [words]) and "Traceback" not in err


def has_rounds(folder, _):
    logs = list(folder.glob("*/rounds.jsonl"))
    return bool(logs) and num_rounds(logs[0]) > 5


def test_an_interrupted_bench_step_keeps_what_was_measured(tmp_path):
    words = "bench step --tokens 64 --hidden 16 --ffn 32 --warmup 1 --ranks 2 --rounds 100000 --json -"
    status, out, _ = interrupted(words.split(), tmp_path, has_rounds)
    assert status == 130
    result = json.loads(out)
    assert result["interrupted"] and all(row["rounds"] >= 4 for row in result["rows"])
