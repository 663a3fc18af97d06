"""A link that collectives share while they are under way.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


class Sent(Protocol):
    """A message under way, with its begin and its end."""

    begin: Any
    end: Any


@dataclass
class _Transfer:
    """The seconds for which it will still have the whole link, and those until it is there after that."""

    sent: Sent
    axes: Any
    left: float
    tail: float
    begun: bool = False


@dataclass
class SharedLink:
    """The link of a rank: collectives over the same axes go one after another, those over others share it evenly.

    So do connections: what goes to one peer keeps its order, and several peers get as much of a link each.
    """

    now: float = 0.0
    under_way: list[_Transfer] = field(default_factory=list)

    def send(self, sent: Sent, now: float, axes: str, seconds: float, occupied: float) -> None:
        """Tell when this one, and all that are under way, begin and end if nothing else is sent.

        Args:
            seconds: that it takes alone.
            occupied: of these, those for which it takes the link.
        """
        self._serve(now)
        self.under_way.append(_Transfer(sent, axes, occupied, seconds - occupied))
        SharedLink(self.now, [replace(each) for each in self.under_way])._serve(math.inf)

    def _serve(self, until: float) -> None:
        """Serve those that are under way until then, or until none is left; those that are done go."""
        while self.under_way and self.now < until:
            heads: dict[object, _Transfer] = {}
            for each in self.under_way:
                heads.setdefault(each.axes, each)
            for each in heads.values():
                if not each.begun:
                    each.sent.begin, each.begun = self.now, True
            seconds = min(min(each.left for each in heads.values()) * len(heads), until - self.now)
            self.now += seconds
            for each in heads.values():
                each.left -= seconds / len(heads)
                if each.left <= 1e-12:
                    each.sent.end = self.now + each.tail
                    self.under_way.remove(each)
        self.now = max(self.now, until)
