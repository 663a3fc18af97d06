"""The process that forks the ranks may be killed at any moment: the next call works all the same."""

import os
import signal
import socket
import threading
from unittest import mock

from forked import with_torch
from process_states import wait_until_gone

from ndtp.testing import RankPool, pool, zygote
from ndtp.testing.process import RankProcess
from ndtp.testing.zygote import STATUS


def test_a_zygote_may_be_killed_while_it_starts_ranks_and_just_before_a_call():
    with_torch(kill_two, spares=3)


def kill_two():
    mine, fork, requests = zygote.Zygote(), zygote.Zygote.fork, []

    def fork_or_die(self, *args):
        requests.append(self._process.pid)
        if len(requests) == 2:
            os.kill(self._process.pid, signal.SIGKILL)
        fork(self, *args)

    with (
        mock.patch.object(pool, "_zygote", lambda pid: mine),
        mock.patch.object(zygote.Zygote, "fork", fork_or_die),
        RankPool(2) as ranks,
    ):
        pids = ranks.run(os.getpid)
        assert len(set(requests)) == 2 and len(set(pids)) == 2, "all ranks have one zygote, the second"
        assert len(os.listdir(mine.folder)) == 3, "a store, and a trace of each rank"

        # One that is about to go: the process is there for a moment still, and so are its ranks, which must not be
        # called any more.
        folder, held = mine.folder, len(os.listdir("/dev/fd")) - 1  # the connection of the spare that becomes the third
        mine._control.shutdown(socket.SHUT_RDWR)
        again = ranks.run(os.getpid)
        assert not set(pids) & set(again)
        assert len(os.listdir("/dev/fd")) == held and not os.path.exists(folder), "nothing of the old one is left"
        wait_until_gone(pids)
    mine._end()


def test_process_ids_are_waited_for():
    """What a rank says may come before its id, which another process tells."""
    told, tell = os.pipe()
    rank = RankProcess(0, None, told, "")
    threading.Timer(0.1, os.write, (tell, zygote.STATUS.pack(os.getpid()))).start()
    assert rank.pid == 0 and rank.process_id() == os.getpid() == rank.pid
    os.close(tell)
    os.close(told)


def test_threads_that_ask_for_an_id_at_once(monkeypatch):
    """A record that two threads have waited for is read by one of them, and the other one goes on."""
    ours, theirs = os.pipe()
    rank = RankProcess(0, None, ours, "")
    monkeypatch.setattr("ndtp.testing.process.wait", lambda *_: [ours])  # as it says to both
    monkeypatch.setattr("ndtp.testing.process._DEATH_S", 0.1)
    assert rank.process_id() == 0 and rank.alive, "another thread has read it"
    os.write(theirs, STATUS.pack(123))
    assert rank.process_id() == 123
    os.close(theirs)
    assert rank.poll_exit() and rank.exit_code is None
    os.close(ours)
