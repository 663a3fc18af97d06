"""This rank's links, looked at every few seconds: a bad one is told of once, by one of the ranks that see it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping

from ndtp.collectives.link_verdict import LEAST_SENT, BadLink, OwnLinks, bad_links, is_bad, usual_of
from ndtp.collectives.links import PeerLink, ask_peers, own_links
from ndtp.collectives.notices import Notices
from ndtp.collectives.places import Places
from ndtp.errors import warn

LOOK_S = 5.0  # of up to 64 ranks; more look less often
KEPT, MOST_KEPT = 6, 24  # looks, over which segments are counted; the second of a link that sends few
TWICE = 2  # looks in turn at which a link is bad, before it is told of


class LinkWatch:
    """The links of one rank, and what others have said of theirs; for one thread.

    Attributes:
        every_s: between looks.
    """

    def __init__(self, rank: int, size: int, places: Places) -> None:
        self._rank, self._size, self._places = rank, size, places
        self.every_s = LOOK_S * max(1.0, size / 64)
        self._totals: deque[Mapping[str, PeerLink]] = deque(maxlen=MOST_KEPT)
        self._others: dict[int, OwnLinks] = {}
        self._bad_before = 0

    def own(self) -> OwnLinks:
        """This rank's own view: segments since some looks ago, the rest as it is now."""
        addresses, totals = own_links()
        links = {address: self._of_late(address, link) for address, link in totals.items()}
        return OwnLinks(tuple(sorted(addresses)), links)

    def _of_late(self, address: str, link: PeerLink) -> PeerLink:
        """A link with the segments since some looks ago: as many looks as it takes to tell a share."""
        kept, late = list(self._totals), link
        for before in kept[max(0, len(kept) - KEPT) :: -1]:
            first = before.get(address)
            if first is None or first.sent > link.sent or first.again > link.again:  # connected anew since
                break
            late = link._replace(sent=link.sent - first.sent, again=link.again - first.again)
            if late.sent >= LEAST_SENT:
                break
        return late

    def look(self, store: Notices) -> None:
        """Say what this rank sees, and warn of a link that stays bad."""
        seen = self.own()
        self._totals.append(own_links()[1])
        if not seen.links:
            return
        store.tell_links(json.dumps(seen.as_json()))
        usual = usual_of(seen.links.values())
        self._bad_before = self._bad_before + 1 if any(is_bad(each, usual) for each in seen.links.values()) else 0
        if self._bad_before < TWICE:
            # Of others only whose addresses are whose is still true.
            self._others = {rank: each._replace(links={}) for rank, each in self._others.items()}
            return
        self.read(store)
        for each in self.bad(seen):
            kind = "gone" if each.is_gone else "slow"
            if store.is_first_to_tell(f"{kind} link {each.ranks} {each.peers if len(each.ranks) > 1 else ''}"):
                warn(f"ndtp: {self.sentence(each)}", RuntimeWarning)

    def read(self, store: Notices) -> dict[int, OwnLinks]:
        """Hear what the others have seen."""
        for rank, said in store.links_of(rank for rank in range(self._size) if rank != self._rank).items():
            self._others[rank] = OwnLinks.of(json.loads(said))
        return {**self._others, self._rank: self.own()}

    def ask(self) -> None:
        """Begin to find out which machines do not answer, of those that nothing is sent to."""
        ask_peers()

    def bad(self, seen: OwnLinks | None = None) -> list[BadLink]:
        """The links that are bad, by what this rank sees, and by what others have said so far."""
        return bad_links({**self._others, self._rank: self.own() if seen is None else seen})

    def sentence(self, bad: BadLink) -> str:
        return bad.sentence(self._places.name_of, self._places.axes_between)
