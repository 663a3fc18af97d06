"""A program that starts again finds nothing in a store of what its ranks wrote there before."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from ndtp.collectives.fresh_store import fresh


def start(store, size=3, come=None):
    """What all ranks of a start, or those that come, get."""
    with ThreadPoolExecutor(size) as ranks:
        asked = [
            ranks.submit(fresh, store, rank, size, timedelta(seconds=0.5 if come else 20))
            for rank in come or range(size)
        ]
        return [each.result() for each in asked]


def test_ranks_of_one_start_share_a_store_and_those_of_the_next_another():
    store = HashStore()
    first, *others = start(store)
    first.set("address", "of a rank that died")
    assert all(each.get("address") == b"of a rank that died" for each in others)
    for _ in range(5):
        again = start(store)
        assert not any(each.check(["address"]) for each in again)
        again[1].set("address", "a new one")
        assert all(each.get("address") == b"a new one" for each in again)


def test_a_rank_that_does_not_come_is_an_error():
    store = HashStore()
    start(store)  # which has left the word of every rank
    with pytest.raises(RuntimeError, match="not all of 3 ranks"):
        start(store, come=(0, 2))
