"""Every survivor of a fault names the rank to blame, in one error of ndtp's: on processes with a store of their own."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

import ndtp
from ndtp import CommunicationError, Grid, ProcessGrid
from ndtp.collectives.flight import WAITED, Note
from ndtp.collectives.labels import Label
from ndtp.collectives.last_words import tell_of
from ndtp.collectives.liveness import own_identity
from ndtp.collectives.local_words import LocalWords
from ndtp.collectives.notices import Notices
from ndtp.collectives.presence import Presence
from ndtp.collectives.verdict import ANSWER, BEHIND, GONE, LOST, RAISED, TOLD, Event, Verdict
from ndtp.collectives.watch import failure
from ndtp.measure.flight_records import read_flights
from ndtp.measure.flight_report import report
from ndtp.testing import RankError, RankPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
VICTIM = 3


def fail(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        if os.fork() == 0:  # this process ends when all others have told of it: nobody waits for it longer
            while len(list(Path(os.environ["NDTP_FLIGHT"]).glob("flight_*.json"))) < 3 and os.getppid() != 1:
                time.sleep(0.1)
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "late":
        time.sleep(40)


def train(how, timeout):
    mesh = ProcessGrid(Grid(x=2, y=2), timeout=timeout)
    block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="2d")
    x = torch.ones(block.in_layout.shard_shape((8, 8)))
    for step in range(3):
        if step == 2 and mesh.rank == VICTIM:
            fail(how)
        block(x).sum().backward()


def start(how, timeout):
    """A fault before the victim has come to the grid."""
    if dist.get_rank() == VICTIM:
        ProcessGrid(Grid(x=4))  # whose groups are there
        fail(how)
    ProcessGrid(Grid(x=4))
    ProcessGrid(Grid(x=2, y=2), timeout=timeout)


def pass_on(how, timeout):
    """A fault between the stages of a pipeline, in a message of torch's schedule."""
    pipeline = ndtp.Pipeline([Grid(x=2), Grid(x=2)], (4, 8), scheme="1d-sp")
    mesh = pipeline.mesh(timeout=timeout)
    stage = ndtp.PipelineStage(ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d-sp"), pipeline)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: ((y - target) ** 2).sum())
    batch = torch.ones(8, 8)
    for step in range(3):
        if step == 2 and dist.get_rank() == VICTIM:
            fail(how)
        rows = stage.rows(batch, 2)
        schedule.step(rows) if stage.is_first else schedule.step(target=rows)


WORDS = {"killed": "gone", "stopped": "stopped", "late": "behind"}


@pytest.mark.parametrize(
    ("place", "how"),
    [(train, "killed"), (train, "late"), (pass_on, "killed"),
     (pass_on, "stopped"), (start, "killed"), (start, "stopped")],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_survivors_name_the_victim(place, how, tmp_path, monkeypatch):
    monkeypatch.setenv("NDTP_FLIGHT", str(tmp_path))
    monkeypatch.setattr("ndtp.testing.pool._GRACE_S", 3.0)  # ranks may wait for a processor longer than half a second
    deadly = how == "killed" and place is not start
    with RankPool(4) as pool, pytest.raises(RankError) as caught:
        pool.run(place, how, 60.0 if deadly else 2.0, timeout=30, wait_all=place is start)
    errors = [each for rank, each in caught.value.exceptions.items() if rank != VICTIM]
    assert errors and all(isinstance(error, CommunicationError) for error in errors), caught.value
    for error in errors:
        assert (error.how, error.ranks) == (WORDS[how], (VICTIM,)), error
        assert f"rank {VICTIM}" in str(error).partition("cause:")[0].partition("failed:")[2]
    record = json.loads(next(path for path in tmp_path.glob("flight_*.json")).read_text())
    assert record["collectives"] and any(entry["done"] is None for entry in record["collectives"])
    found = report(read_flights(tmp_path))
    assert VICTIM in found.missing and any(found.unfinished.values())


def wait_beside_a_loader():
    """A worker process of a DataLoader is killed: torch raises that in whatever the main thread is at."""
    mesh = ProcessGrid(Grid(x=2), timeout=30)
    if mesh.rank == 1:
        cause = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        error = failure(Label(("mlp.up",), "forward", "all_gather", ("x",)), mesh.describe, cause, (0, 1))
        dist.barrier()
    else:
        dist.barrier()
        error = tell_of(RuntimeError("Connection closed by peer"))
    dist.barrier()
    return error.how, error.ranks, str(error)


def test_an_error_of_this_rank_in_the_middle_of_a_wait_is_its_own():
    with RankPool(2) as pool:
        for how, blamed, said in pool.run(wait_beside_a_loader):
            assert (how, blamed) == ("raised", (1,)) and "DataLoader worker" in said


@pytest.mark.parametrize("wrong_s", [-1e6, 1e6])
def test_clocks_of_other_machines_say_nothing(wrong_s, monkeypatch):
    """Neither their monotonic clocks, which count from other boots, nor a clock on the wall that is set meanwhile."""
    store = dist.HashStore()
    elsewhere = replace(own_identity(1), machine="another boot")
    other = Notices(store, 1, elsewhere, 2)
    other.introduce()
    monkeypatch.setattr("ndtp.collectives.presence.TICK_S", 0.05)
    monkeypatch.setattr("ndtp.collectives.presence.BREAK_S", 0.5)
    monkeypatch.setattr("ndtp.collectives.link_watch.LOOK_S", 0.05)
    here = Presence(0, 2, store, 1)
    try:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))  # a program that has no descriptor left
        time.sleep(0.2)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        assert here._thread.is_alive()
        begin = time.monotonic()
        other.log(Event(1, RAISED, "KeyError: 'x'", begin + wrong_s))
        verdict = here.lost("all_gather", (0, 1))
        monkeypatch.setattr(time, "time", lambda: 1e12 + wrong_s)
        assert (verdict.how, verdict.ranks) == (RAISED, (1,))
        assert here.has_lost() == (time.monotonic() - begin > 0.5), "nobody has had time to notice"
        while not here.has_lost():
            assert time.monotonic() - begin < 20
            time.sleep(0.02)
    finally:
        here.close()


def test_who_hears_of_a_loss_says_what_it_waits_in(monkeypatch, capfd):
    """At once, and not after a heartbeat: a rank that has said nothing could be taken for one that is behind.

    A rank whose launcher ends it asks so too, and does not blame one that ends by the same signal.
    """
    ended = threading.Event()
    monkeypatch.setattr("ndtp.collectives.presence.end_at_once", ended.set)
    monkeypatch.setattr("ndtp.collectives.presence.TICK_S", 60.0)
    monkeypatch.setenv("NDTP_FLIGHT", "/proc/none")
    store, me = dist.HashStore(), own_identity(0)
    with subprocess.Popen(["sleep", "60"]) as process:
        peer = replace(own_identity(1), pid=process.pid, begun=int(_stat(process.pid)[19]))
        words, here = LocalWords(peer, 1), None
        try:
            Notices(store, 1, peer, 2).introduce()
            with pytest.warns(RuntimeWarning, match="NDTP_FLIGHT=/proc/none: no record of"):
                here = Presence(0, 2, store, 1)
            while 1 not in here._peers.known:
                time.sleep(0.01)
            here.flight.start(Note(("up",), "forward", "all_gather", ("x",), "", (0, 1)), 0)[WAITED] = time.monotonic()
            words.tell(Event(1, LOST, "all_gather", time.monotonic(), [0]), [me])
            until = time.monotonic() + 20
            while not (heard := words.heard()) and time.monotonic() < until:
                time.sleep(0.01)
            assert [(each.kind, tuple(each.ranks)) for each in heard] == [(ANSWER, (1,))]
            words.tell(Event(1, ANSWER, "", time.monotonic()), [me])
            while not (facts := here._local_facts()).free and time.monotonic() < until:
                time.sleep(0.01)
            assert facts.free == {1}
            os.write(here._wake_write, bytes([signal.SIGTERM]))
            while not (heard := words.heard()) and time.monotonic() < until:
                time.sleep(0.01)
            assert [(each.kind, tuple(each.ranks)) for each in heard] == [(TOLD, (1,))]
            words.tell(Event(1, TOLD, "", time.monotonic()), [me])
            words.tell(Event(1, ANSWER, "", time.monotonic()), [me])
            process.kill()
            assert ended.wait(20) and "behind: rank 1, alive" in capfd.readouterr().err
        finally:
            words.close()
            process.kill()
            if here is not None:
                here.close()


@pytest.mark.parametrize(("found", "is_said"), [(Verdict(BEHIND, (0,), "alive"), False), (Verdict(GONE, (0,)), True)])
def test_a_rank_that_waits_for_nobody_blames_none_that_is_there(monkeypatch, capfd, found, is_said):
    """Its launcher ended it alone, in its own work."""
    monkeypatch.setattr("ndtp.collectives.presence.end_at_once", lambda: None)
    me = mock.Mock(
        _said="", rank=1, size=2, place=lambda rank: "", _consult=lambda ranks, verdicts: verdicts.append(found)
    )
    me.flight.waiting.return_value = None
    Presence._end_as_told(me)
    said = capfd.readouterr().err
    assert ("rank 1 was ended by its launcher in its own work\n  gone: rank 0" in said) == is_said == bool(said)


def _stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
