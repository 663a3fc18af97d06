"""Which links are bad, from what ranks see of them: a table of cases, without a network."""

import socket
import sys

import pytest

from ndtp.algebra.grid import Grid
from ndtp.collectives.link_verdict import BadLink, OwnLinks, bad_links, refined
from ndtp.collectives.links import PeerLink, ask_peers, own_links
from ndtp.collectives.places import Places
from ndtp.collectives.verdict import BEHIND, LINK, RAISED, SILENT, UNKNOWN, Verdict

GOOD = PeerLink(sent=1000, again=1, rtt_ms=0.3, least_rtt_ms=0.1)
LOSSY = PeerLink(sent=1000, again=40, rtt_ms=0.4, least_rtt_ms=0.1)
FAR = PeerLink(sent=1000, again=0, rtt_ms=52.0, least_rtt_ms=50.0)
LOADED = PeerLink(sent=1000, again=0, rtt_ms=80.0, least_rtt_ms=0.1)  # as behind a link of 1 Mbit/s
GONE = PeerLink(sent=1000, again=6, rtt_ms=0.3, least_rtt_ms=0.1, unanswered_s=8.0)


def seen(ranks, bad, link, each=1):
    """What ranks see, of which each machine has some; links between machines `a` and `b` of `bad` are bad."""
    machines = [rank // each for rank in range(ranks)]
    return {
        rank: OwnLinks(
            (f"10.0.0.{mine}",),
            {f"10.0.0.{other}": link if (mine, other) in bad else GOOD for other in {*machines} - {mine}},
        )
        for rank, mine in enumerate(machines)
    }


def all_of(machine, machines=4):
    return {pair for other in range(machines) if other != machine for pair in ((machine, other), (other, machine))}


@pytest.mark.parametrize("link", [LOSSY, FAR, LOADED, GONE], ids=["lossy", "far", "loaded", "gone"])
@pytest.mark.parametrize(
    ("bad", "each", "ranks", "peers"),
    [
        (all_of(2), 1, (2,), (0, 1, 3)),
        ({(2, other) for other in (0, 1, 3)}, 1, (2,), (0, 1, 3)),  # in one direction: one end alone sees it
        ({(1, 3)}, 1, (1, 3), ()),
        (all_of(1), 2, (2, 3), (0, 1, 4, 5, 6, 7)),  # two ranks a machine
        ({pair for machine in range(4) for pair in all_of(machine)}, 1, (), (0, 1, 2, 3)),
    ],
    ids=["a machine", "what it sends", "a link", "a machine of two ranks", "all"],
)
def test_who_is_named(link, bad, each, ranks, peers):
    if not ranks and link is LOADED:
        return  # links that are all alike under load are no fault
    (found,) = bad_links(seen(4 * each, bad, link, each))
    assert (found.ranks, found.peers, found.is_gone) == (ranks, peers, link is GONE)
    places = Places()
    places.add(Grid(x=2, y=2 * each), range(4 * each))
    said = found.sentence(places.name_of, places.axes_between)
    assert all(f"rank {rank} (x=" in said for rank in ranks) and said.startswith("gone" if link is GONE else "slow")
    if ranks == (1, 3):
        assert "over axis x:" in said, said
    if ranks == (2,):
        assert "over axes x, y:" in said, said
    assert ("4 % of 1000 segments" in said) == (link is LOSSY), said
    assert ("a round trip takes" in said) == (link in (FAR, LOADED)), said


def test_nothing_to_tell():
    assert bad_links({}) == [] and bad_links(seen(4, set(), GOOD)) == []
    assert bad_links({0: OwnLinks(("a",), {})}) == []
    assert bad_links(seen(4, {pair for machine in range(4) for pair in all_of(machine)}, LOADED)) == []


@pytest.mark.parametrize(
    ("sent", "again", "is_told"), [(17, 6, False), (199, 20, False), (200, 4, False), (255, 18, True),
     (818, 5, False), (1694, 11, True)],
)  # fmt: skip
def test_a_share_of_few_segments_is_no_evidence(sent, again, is_told):
    """One outage sends one segment again and again."""
    known = seen(4, all_of(2), GOOD._replace(sent=sent, again=again))
    assert [each.ranks for each in bad_links(known)] == [(2,)] * is_told
    gone = BadLink((2,), (0,), GONE._replace(sent=sent, again=again)).sentence()
    assert ("%" in gone) == (sent >= 200) and f"of {sent} segments were sent again" in gone


def test_links_that_are_alike_lose_now_more_now_less():
    """About one in a hundred everywhere is no fault of those that had a little more."""
    known = seen(4, {(0, 1), (1, 0), (2, 3), (3, 2)}, GOOD._replace(again=14))
    known = {rank: each._replace(links={to: link._replace(again=max(link.again, 8)) for to, link in each.links.items()})
             for rank, each in known.items()}  # fmt: skip
    (found,) = bad_links(known)
    assert found.ranks == () and found.link.again == 14


def test_two_links_at_once():
    """A machine and a link that does not lead to it."""
    found = bad_links(seen(6, all_of(2, 6) | {(4, 5)}, LOSSY))
    assert sorted(each.ranks for each in found) == [(2,), (4, 5)]


def test_a_rank_without_a_network_names_itself():
    """It hears of nobody: neither what they see, nor that they live."""
    known = seen(4, all_of(2), GONE)
    alone = {rank: each if rank == 2 else each._replace(links={}) for rank, each in known.items()}
    store_is_gone = Verdict(SILENT, (0,), "which has the store, and does not answer")
    bad = bad_links(alone)
    verdict = refined(store_is_gone, 2, bad, lambda each: each.sentence())
    assert (verdict.how, verdict.ranks) == (LINK, (2,)) and "gone link: rank 2" in verdict.sentence()
    lossy = bad_links({2: OwnLinks(("10.0.0.2",), {"10.0.0.0": GONE, "10.0.0.1": LOSSY, "10.0.0.3": LOSSY})})
    assert refined(store_is_gone, 2, lossy, lambda each: "seen")[:2] == (SILENT, (0,)), "others do answer"
    assert refined(store_is_gone, 1, bad, lambda each: "seen")[:2] == (SILENT, (0,))
    assert refined(Verdict(UNKNOWN, ()), 1, bad, lambda each: "seen")[:2] == (LINK, (2,))
    for how in (RAISED, BEHIND):
        told = refined(Verdict(how, (3,), "which is so"), 2 if how == RAISED else 1, bad, lambda each: "and a link")
        assert told == Verdict(how, (3,), "which is so; and a link")
    assert refined(store_is_gone, 2, [], str) == store_is_gone


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's TCP")
def test_links_of_a_machine_with_itself_are_none():
    """Two loopback addresses stand for two machines."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.socket() as client:
            client.bind(("127.0.0.2", 0))
            client.connect(server.getsockname())
            peer, _ = server.accept()
            with peer, socket.create_connection(server.getsockname()):  # the last: from 127.0.0.1 to 127.0.0.1
                for _ in range(9):
                    client.sendall(b"x")
                    peer.recv(1)
                addresses, found = own_links()
                assert {"127.0.0.1", "127.0.0.2"} <= addresses
                assert found["127.0.0.1"].sent == 9 and found["127.0.0.1"].again == 0
                assert 0 < found["127.0.0.1"].rtt_ms < 1000 and found["127.0.0.1"].unanswered_s == 0
                client.sendall(b"x")
                assert peer.recv(1) == b"x", "they are open still"
                ask_peers()
                assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1
