"""`ndtp.links`: what the kernels of all machines know of the connections between ranks.

print(ndtp.links())                     # on any rank, at any time: it is no collective
"""

from __future__ import annotations

from dataclasses import dataclass

from ndtp.collectives.link_verdict import OwnLinks
from ndtp.collectives.own_presence import presence
from ndtp.collectives.presence import REMOTE_PATIENCE_S


@dataclass(frozen=True)
class LinkReport:
    """The links between machines, as each rank has seen them in the last half of a minute.

    Attributes:
        seen: what each rank has said of its own end, by rank of the world; ranks say so every five seconds.
        bad: a sentence for each link, or machine, that is slow, loses packets or does not answer.
    """

    seen: dict[int, OwnLinks]
    bad: list[str]

    def __str__(self) -> str:
        lines = [f"{'rank':>5}  {'to':24} {'segments':>9} {'again':>7} {'round trip ms':>14} {'least':>8}"]
        for rank, mine in sorted(self.seen.items()):
            for address, link in sorted(mine.links.items()):
                to = ", ".join(f"rank {other}" for other, its in sorted(self.seen.items()) if address in its.addresses)
                sent = f"{link.sent:9} {link.again:7} {link.rtt_ms:14.3f} {link.least_rtt_ms:8.3f}"
                lines.append(f"{rank:5}  {to or address:24} {sent}")
        if len(lines) == 1:
            return "no connection between ranks leads over a network"
        return "\n".join([*lines, *(self.bad or ["no link is slow, loses packets or is gone"])])


def links() -> LinkReport:
    """Look at the links between ranks; see `LinkReport`."""
    here = presence()
    if here is None:
        return LinkReport({}, [])
    seen = here.ask(here.link_watch.read, REMOTE_PATIENCE_S)
    return LinkReport(seen or {}, [here.link_watch.sentence(each) for each in here.link_watch.bad()])
