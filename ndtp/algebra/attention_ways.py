"""The ways in which attention of split sequences brings queries and keys together, and what each costs.  Pure.

With p ranks along a sequence, and q and kv the elements of a rank's queries, and of its keys and values together:

| way | received in forward | in backward | kept until backward |
|---|---|---|---|
| gather | (p - 1) kv | the same | p kv |
| heads | (p - 1) / p (2 q + kv) | the same | kv |
| ring | (p - 1) kv | (p - 1) kv, and p times the gradients of kv | kv |

Heads need as many heads as ranks.  A ring moves most, beside products that are longer than its messages where sequences
are; and its ranks swap halves where attention is causal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from ndtp.errors import LayoutError

WAYS = ("gather", "ring", "heads")
# Whole keys and values are kept where they take no more than so many times the queries of a rank: the activations of
# the rest of a layer (hidden states, norms, projections, an MLP) take about as much.
KEPT = 8


@dataclass(frozen=True)
class AttentionWays:
    """One attention of split sequences, with the sizes that decide.

    Attributes:
        ranks: along the sequence.
        heads, kv_heads: of queries and of keys, on each of these ranks.
        q, kv: elements of a rank's queries, and of its keys and values together.
    """

    ranks: int
    heads: int
    kv_heads: int
    q: int
    kv: int

    @property
    def repeats(self) -> int:
        """Return how often each key head is sent, so that the ranks divide the key heads; 0 where heads do not go."""
        times = lcm(self.kv_heads, self.ranks) // self.kv_heads
        return times if self.heads % self.ranks == 0 and self.heads % (self.kv_heads * times) == 0 else 0

    def received(self, way: str) -> int:
        """Return the elements that a rank receives in forward."""
        if way == "heads":
            return (2 * self.q + self.repeats * self.kv) * (self.ranks - 1) // self.ranks
        return (self.ranks - 1) * self.kv

    def kept(self, way: str) -> int:
        """Return the elements of keys and values that a rank keeps until backward."""
        return self.kv * (self.ranks if way == "gather" else max(self.repeats, 1) if way == "heads" else 1)

    def best(self) -> str:
        """Return the way that "auto" takes: heads where they move least, else a gather unless it keeps too much."""
        if self.repeats and self.received("heads") < self.received("gather"):
            return "heads"
        return "gather" if self.kept("gather") <= KEPT * self.q else "ring"

    def why(self) -> str:
        """Return the reason for the best way, in a sentence."""
        way = self.best()
        if way == "heads":
            share = self.received("heads") / max(self.received("gather"), 1)
            return f"{self.ranks} ranks divide the heads, and an all-to-all moves {share:.0%} of a gather's elements"
        few = f"each rank has {self.heads} heads, which {self.ranks} ranks do not divide"
        more = "an all-to-all of heads moves no less" if self.repeats else few
        if way == "gather":
            return f"keys and values are few, {self.kept('gather') / max(self.q, 1):.2g} times the queries; {more}"
        return f"whole keys and values are {self.kept('gather') / max(self.q, 1):.3g} times a rank's queries; {more}"


def known_way(way: str) -> str:
    """Return the name of a way, or "auto".

    Raises:
        LayoutError: it is none.
    """
    if way not in ("auto", *WAYS):
        raise LayoutError(f"attention={way!r} is none of auto, {', '.join(WAYS)}")
    return way
