"""Links between machines that are slow, lose packets or are gone, from what all ranks see of their own. Pure.

A rank sees its own end of a link.  Where most links of one machine are bad and those among the others are not, that
machine is named; what is left are links between two machines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ndtp.collectives.links import PeerLink
from ndtp.collectives.verdict import LINK, UNKNOWN, Verdict

LOST_SHARE, LEAST_AGAIN = 0.01, 5  # segments that were sent again, of those that were sent
# Of fewer segments a share is no evidence: one outage sends the same segment again and again.  Of so many, a link that
# loses one in a thousand has five sent again less than once in 400,000 times.
LEAST_SENT = 200
SLOW_MS, TIMES = 5.0, 4.0  # a round trip: so long at least, and so many times as long as on other links
MORE_SHARE, MORE_TIMES = 0.005, 3.0  # segments that were sent again: so many, and so many times as many as elsewhere
LONG_MS, LOADED_MS = 10.0, 100.0  # slow whatever the others are: of an idle link; of one under load
UNANSWERED_S = 3.0
MOST = 2 / 3  # of the links of a machine, for the machine to be named

MachinePair = frozenset[str]  # the machines at both ends of a link, by an address of each


class OwnLinks(NamedTuple):
    """The links that one rank sees, of some seconds.

    Attributes:
        addresses: its own.
        links: by the address at the other end.
    """

    addresses: tuple[str, ...]
    links: Mapping[str, PeerLink]

    def as_json(self) -> list[Any]:
        return [list(self.addresses), dict(self.links)]

    @staticmethod
    def of(said: Any) -> OwnLinks:
        return OwnLinks(tuple(said[0]), {address: PeerLink(*numbers) for address, numbers in said[1].items()})


class BadLink(NamedTuple):
    """Links that are slow, lose packets or do not answer.

    Attributes:
        ranks: those of the machine that all of them lead to, or of both ends of one link; () where all links are alike.
        peers: the ranks at the other ends.
        link: of the worst of them.
        usual_ms: the round trip of other links; 0 where there is no other.
        num_links: how many they are.
    """

    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    link: PeerLink
    usual_ms: float = 0.0
    num_links: int = 1

    @property
    def is_gone(self) -> bool:
        return self.link.unanswered_s >= UNANSWERED_S

    def sentence(
        self,
        place: Callable[[int], str] = lambda rank: "",
        axes: Callable[[Sequence[int], Sequence[int]], tuple[str, ...]] = lambda ranks, others: (),
    ) -> str:
        """Return it in words: "slow link: rank 2 (x=0, y=1), over axis x: 4.1 % of 512 segments were sent again"."""
        link, said = self.link, []
        if self.is_gone:
            said.append(f"nothing was acknowledged for {link.unanswered_s:.1f} s")
        if link.again:
            share = f"{100 * _lost(link):.3g} %" if link.sent >= LEAST_SENT else f"{link.again}"
            said.append(f"{share} of {link.sent} segments were sent again")
        if link.rtt_ms >= SLOW_MS:
            others = f", {self.usual_ms:.2g} on other links" if self.usual_ms else ""
            said.append(f"a round trip takes {link.rtt_ms:.3g} ms{others}")
        over = axes(self.ranks, self.peers or self.ranks)
        names = ", ".join(f"rank {rank}{place(rank)}" for rank in self.ranks) or "all machines"
        along = f", over {'axes' if len(over) > 1 else 'axis'} {', '.join(over)}" if over else ""
        return f"{'gone' if self.is_gone else 'slow'} link: {names}{along}: {', '.join(said)}"


def usual_of(links: Collection[PeerLink]) -> tuple[float, float]:
    """Return the round trip, and the share of segments sent again, that a quarter of the links have at most."""
    if len(links) < 2:
        return 0.0, 0.0
    trips, shares = sorted(link.rtt_ms for link in links), sorted(_lost(link) for link in links)
    return trips[len(links) // 4], shares[len(links) // 4]


def is_bad(link: PeerLink, usual: tuple[float, float]) -> bool:
    """Whether a link is worth telling of, beside others of which `usual_of` tells."""
    usual_ms, usual_lost = usual
    return (
        link.unanswered_s >= UNANSWERED_S
        or (link.again >= LEAST_AGAIN and _lost(link) >= LOST_SHARE)
        or (link.again >= 2 * LEAST_AGAIN and _lost(link) >= max(MORE_SHARE, MORE_TIMES * usual_lost))
        or link.least_rtt_ms >= LONG_MS
        or link.rtt_ms >= (max(SLOW_MS, TIMES * usual_ms) if usual_ms else LOADED_MS)
    )


def bad_links(seen: Mapping[int, OwnLinks]) -> list[BadLink]:
    """Return the links that are bad, those of one machine together, the worst first.

    Args:
        seen: by rank of the world.
    """
    at: dict[str, list[int]] = defaultdict(list)
    for rank, each in sorted(seen.items()):
        for address in each.addresses:
            at[address].append(rank)
    pairs: dict[MachinePair, PeerLink] = {}
    home = {address: min(each.addresses) for each in seen.values() for address in each.addresses}
    for each in seen.values():
        for address, link in each.links.items():
            key = frozenset({min(each.addresses, default=""), home.get(address, address)})
            pairs[key] = _worse(pairs[key], link) if key in pairs else link
    usual = usual_of(pairs.values())
    bad = {key for key, link in pairs.items() if is_bad(link, usual)}
    gone = {key for key in bad if pairs[key].unanswered_s >= UNANSWERED_S}
    good = sorted(link.rtt_ms for key, link in pairs.items() if key not in bad)
    usual_ms = good[len(good) // 2] if good else 0.0
    found = []
    for kind in (gone, bad - gone):
        alike = kind and {key for key, link in pairs.items() if key in kind or _lost(link) >= MORE_SHARE}
        if len(alike) > MOST * len(pairs) and not frozenset.intersection(*pairs):
            worst = max((pairs[key] for key in kind), key=_badness)
            found.append(BadLink((), tuple(sorted(seen)), worst, num_links=len(kind)))
            continue
        for ranks, keys in _blamed(kind, pairs, at):
            ends = {rank for key in keys for each in key for rank in at[each]}
            worst = max((pairs[key] for key in keys), key=_badness)
            found.append(BadLink(ranks, tuple(sorted(ends - set(ranks))), worst, usual_ms, len(keys)))
    return sorted(found, key=lambda each: _badness(each.link), reverse=True)


def _blamed(
    bad: Collection[MachinePair], pairs: Mapping[MachinePair, PeerLink], at: Mapping[str, Sequence[int]]
) -> Iterator[tuple[tuple[int, ...], set[MachinePair]]]:
    """Yield the ranks to name for some of the links that are bad, until none is left."""
    left = set(bad)
    while left:
        counts = Counter(name for key in left for name in key)
        shares = {name: count / sum(name in key for key in pairs) for name, count in counts.items()}
        name = max(sorted(counts), key=lambda each: (counts[each] > 1 and shares[each] >= MOST, counts[each]))
        if counts[name] > 1 and shares[name] >= MOST:
            keys, names = {key for key in left if name in key}, {name}
        else:
            worst = max(left, key=lambda key: _badness(pairs[key]))
            keys, names = {worst}, set(worst)
        yield tuple(sorted(rank for each in names for rank in at[each])), keys
        left -= keys


def refined(verdict: Verdict, me: int, bad: Sequence[BadLink], say: Callable[[BadLink], str]) -> Verdict:
    """A verdict on a failure, by one who knows which links are bad.

    A rank whose own links all are gone hears of nobody, and would take all others for lost.
    """
    mine = [each for each in bad if each.is_gone and me in each.ranks and each.num_links > 1]
    if mine and not verdict.is_sure:
        return Verdict(LINK, mine[0].ranks, say(mine[0]))
    if bad and verdict.how == UNKNOWN:
        return Verdict(LINK, bad[0].ranks, say(bad[0]))
    return verdict._replace(text="; ".join(filter(None, (verdict.text, *map(say, bad[:1])))))


def _worse(one: PeerLink, other: PeerLink) -> PeerLink:
    """Two ends of one link: what the worse direction has lost, and the longer of the round trips."""
    lossy = max(one, other, key=lambda link: (_lost(link), link.sent))
    return PeerLink(lossy.sent, lossy.again, max(one.rtt_ms, other.rtt_ms),
                max(one.least_rtt_ms, other.least_rtt_ms), max(one.unanswered_s, other.unanswered_s))  # fmt: skip


def _badness(link: PeerLink) -> tuple[float, float]:
    return link.unanswered_s, link.rtt_ms / 100 + _lost(link)


def _lost(link: PeerLink) -> float:
    """Return the share of segments that were sent again; 0 where they are too few to tell."""
    return link.again / max(link.sent, link.again) if link.sent >= LEAST_SENT else 0.0
