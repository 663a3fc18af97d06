"""Ranks look at their links: one of them tells of a bad one, once, after it was bad twice."""

import warnings
from dataclasses import replace

import pytest
import torch.distributed as dist

from ndtp.algebra.grid import Grid
from ndtp.collectives import link_watch
from ndtp.collectives.link_watch import KEPT, MOST_KEPT, LinkWatch
from ndtp.collectives.links import PeerLink
from ndtp.collectives.liveness import own_identity
from ndtp.collectives.notices import Notices
from ndtp.collectives.places import Places

RANKS = 3


def looked(watches, stores, monkeypatch, lost):
    """All ranks look, whose connections to rank 2 have sent so many segments again so far; returns the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rank, (watch, store) in enumerate(zip(watches, stores, strict=True)):
            links = {
                f"10.0.0.{other}": PeerLink(
                    lost.get("each", 1000) * (lost["looks"] + 1), lost["again"] * (2 in (rank, other)), 0.2, 0.1
                )
                for other in range(RANKS)
                if other != rank
            }
            monkeypatch.setattr(link_watch, "own_links", lambda links=links, rank=rank: ({f"10.0.0.{rank}"}, links))
            watch.look(store)
    lost["looks"] += 1
    return [str(each.message) for each in said]


@pytest.mark.parametrize("again", [0, 60])
def test_a_bad_link_is_told_of_once(again, monkeypatch):
    shared, places = dist.HashStore(), Places()
    places.add(Grid(x=3), range(RANKS))
    stores = [Notices(shared, 1, replace(own_identity(rank), machine=str(rank)), RANKS) for rank in range(RANKS)]
    watches = [LinkWatch(rank, RANKS, places) for rank in range(RANKS)]
    lost = {"looks": 0, "again": 0}
    assert [looked(watches, stores, monkeypatch, lost) for _ in range(2)] == [[], []]
    lost["again"] = again
    said = [text for _ in range(4) for text in looked(watches, stores, monkeypatch, lost)]
    if not again:
        assert said == []
        return
    assert len(said) == 1 and "slow link: rank 2 (x=2), over axis x: " in said[0] and "sent again" in said[0], said
    for _ in range(KEPT):
        looked(watches, stores, monkeypatch, lost)
    assert watches[-1].bad() == [], "what was lost long ago is forgotten"


def test_links_that_send_little_are_looked_at_for_longer(monkeypatch):
    """Twenty segments a look, one of them lost: after ten looks that is evidence."""
    shared = dist.HashStore()
    stores = [Notices(shared, 1, replace(own_identity(rank), machine=str(rank)), RANKS) for rank in range(RANKS)]
    watches = [LinkWatch(rank, RANKS, Places()) for rank in range(RANKS)]
    lost, told = {"looks": 0, "again": 0, "each": 20}, []
    for look in range(MOST_KEPT):
        lost["again"] += 1
        told += [(look, text) for text in looked(watches, stores, monkeypatch, lost)]
    assert [look >= 9 for look, _ in told] == [True] and "rank 2" in told[0][1], told
