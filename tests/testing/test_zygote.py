"""The process that forks the ranks may be killed at any moment: the next call works all the same."""

import os
import signal
import socket

import pytest
from process_states import wait_until_gone

from ndtp.testing import RankPool, pool, zygote


@pytest.fixture
def mine(monkeypatch):
    """A zygote of the test's own, which imports no more than a rank needs."""
    monkeypatch.setattr(zygote, "_PRELOAD", ("ndtp.testing.worker",))
    monkeypatch.setattr(zygote, "_PACKAGES", ())
    one = zygote.Zygote()
    monkeypatch.setattr(pool, "_zygote", lambda pid: one)
    yield one
    one._end()


def test_a_zygote_may_be_killed_while_it_starts_ranks_and_just_before_a_call(mine, monkeypatch):
    fork, requests = zygote.Zygote.fork, []

    def fork_or_die(self, *args):
        requests.append(self._process.pid)
        if len(requests) == 2:
            os.kill(self._process.pid, signal.SIGKILL)
        fork(self, *args)

    monkeypatch.setattr(zygote.Zygote, "fork", fork_or_die)
    with RankPool(2) as ranks:
        pids = ranks.run(os.getpid)
        assert len(set(requests)) == 2 and len(set(pids)) == 2, "all ranks have one zygote, the second"
        assert len(os.listdir(mine.folder)) == 3, "a store, and a trace of each rank"

        # One that is about to go: the process is there for a moment still, and so are its ranks, which must not be
        # called any more.
        folder, held = mine.folder, len(os.listdir("/dev/fd"))
        mine._control.shutdown(socket.SHUT_RDWR)
        again = ranks.run(os.getpid)
        assert not set(pids) & set(again)
        assert len(os.listdir("/dev/fd")) == held and not os.path.exists(folder), "nothing of the old one is left"
        wait_until_gone(pids)
