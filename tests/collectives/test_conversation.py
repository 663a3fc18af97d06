"""Rows and texts of all ranks, in memory that they share and by messages: the same either way."""

import os

import torch.distributed as dist

import ndtp
from ndtp.collectives.board import WORDS, Missing, shared_board


def exchanges():
    rank, count = dist.get_rank(), dist.get_world_size()
    conversation = ndtp.ProcessGrid(ndtp.Grid(x=count)).groups.conversation()
    for turn in range(5):
        row = (rank, -turn, *(0,) * (WORDS - 2))
        expected = [(each, *row[1:]) for each in range(count)]
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


def test_one_that_does_not_come_is_named():
    """Of two ranks, of which this process is one, and another one that is told to be it, too."""
    told = []

    def tell(row):
        told.append(row)
        return [row, row]

    board = shared_board(0, 2, 0.0, tell)
    try:
        board.exchange((0,) * WORDS)
    except Missing as error:
        assert error.ranks == [1] and "have not come" in error.why
    else:
        raise AssertionError("nobody was missed")
