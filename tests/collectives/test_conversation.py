"""Rows and texts of all ranks, in memory that they share and by messages: the same either way."""

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import ndtp
from ndtp.collectives import conversation as module
from ndtp.collectives.board import ROW, Missing, shared_board
from ndtp.collectives.conversation import Conversation, HeldElsewhere
from ndtp.collectives.flight import Note
from ndtp.collectives.own_presence import presence


def exchanges():
    rank, count = dist.get_rank(), dist.get_world_size()
    conversation = ndtp.ProcessGrid(ndtp.Grid(x=count)).groups.conversation()
    for turn in range(5):
        rows_of = [bytes([each, turn]).ljust(ROW) for each in range(count)]
        row, expected = rows_of[rank], rows_of
        assert conversation.exchange(row) == expected
        assert conversation._sent_round(row) == expected
    assert conversation._board is not None, "these ranks are on one machine"
    assert conversation.texts("é" * rank) == ["é" * each for each in range(count)]
    return len([name for name in os.listdir("/proc/self/fd") if "memfd:ndtp" in link(name)])


def link(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def test_all_ranks_hear_all(ranks):
    assert ranks(3).run(exchanges) == [1, 1, 1], "one for the board of the grid"


def in_another_exchange():
    """Rank 1 has gone on behind an error, and shows the row of a point where rank 0 says something."""
    conversation = ndtp.ProcessGrid(ndtp.Grid(x=2)).groups.conversation()
    if dist.get_rank():
        return conversation.exchange(b"\xff" * ROW)[1][:1]
    with pytest.raises(RuntimeError, match="rank 1 is in another exchange\n  fix: let an error"):
        conversation.texts("hello")


def test_a_rank_that_goes_on_behind_an_error_is_named(ranks):
    assert ranks(2).run(in_another_exchange) == [None, b"\xff"]


def test_one_that_does_not_come_is_named():
    """Of two ranks, of which this process is one, and another one that is told to be it, too."""
    told = []

    def tell(row):
        told.append(row)
        return [row, row]

    board = shared_board(0, 2, 0.0, tell)
    try:
        board.exchange(bytes(ROW))
    except Missing as error:
        assert error.ranks == [1] and "have not come" in error.why
    else:
        raise AssertionError("nobody was missed")


def test_what_another_thread_may_be_about_to_begin_is_no_reason_to_end(monkeypatch):
    """A rank whose peer waits in a collective that it has not begun: it never will, but for threads beside this one."""
    monkeypatch.setattr(module, "presence", lambda: SimpleNamespace(never_begun=lambda ranks: {1: "all_gather of up"}))
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    own, its = (object.__new__(Conversation) for _ in range(2))
    own.members, own.thread, its.thread = [0, 1], threading.current_thread(), other
    monkeypatch.setattr(module, "_CONVERSATIONS", {0: own, 1: its})
    other.start()
    own._look([1])
    end.set()
    other.join()
    with pytest.raises(HeldElsewhere, match="rank 1 waits in all_gather of up"):
        own._look([1])


def held_by_its_device():
    """Rank 0 has begun a gather for whose end a stream of its device would wait, and comes to no further point."""
    mesh, store = ndtp.ProcessGrid(ndtp.Grid(x=2), timeout=60), dist.distributed_c10d._get_default_store()
    conversation = mesh.groups.conversation()
    conversation.meet()
    if mesh.rank == 0:
        presence().flight.start(Note(("up",), "forward", "all_gather", ("x",), "", (0, 1), waits=False), 0)
        store.wait(["told"], timedelta(seconds=50))
        return None
    try:
        conversation.exchange(bytes(ROW))
    except HeldElsewhere as error:
        store.set("told", "")
        return error.collectives


def test_what_a_rank_has_left_to_its_device_is_known_to_who_waits_for_it(ranks):
    """No host waits in what NCCL runs: a rank that has begun it, and comes no further, is told of by its own thread."""
    assert ranks(2).run(held_by_its_device) == [None, {0: "all_gather of up (forward) over axis x"}]
