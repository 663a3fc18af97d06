"""A clock for recorded programs: their operations on a host, on streams and on links, each of which takes its time.

An independent check of `ndtp.schedule.clocks`, which times the tasks of a plan: here it is what a program has issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ndtp.testing.cuda.multiprocessors import Operation

Seconds = Callable[[Operation], float]


@dataclass
class RecordedClock:
    """The clocks of one rank; every other one is taken to do alike, at the same time.

    Args:
        device: seconds of an operation alone: of a kernel, or of a collective.
        host: seconds for which the host works to issue it; None: a graph does.
        link: by what collectives share a link, one after another; those of one communicator always do.
        contention: how much of the time of a collective that runs beside kernels these lose by it.
    """

    device: Seconds
    host: Seconds | None = None
    link: Callable[[Operation], str] = lambda operation: ""
    contention: float = 0.0
    _ends: dict[tuple[int, int], float] = field(default_factory=dict)
    _links: dict[str, float] = field(default_factory=dict)
    _under_way: list[tuple[float, float]] = field(default_factory=list)

    def step(self, operations: Sequence[Operation], steps: int = 4) -> float:
        """Return the seconds of one of many equal steps, between the ends of the last two."""
        ends, issued = [0.0], 0.0
        for _ in range(steps):
            issued = self._run(operations, issued, ends[-1])
            ends.append(max(self._ends.values(), default=0.0))
        return max(ends[-1] - ends[-2], issued / steps)

    def _run(self, operations: Sequence[Operation], issued: float, begin: float) -> float:
        """Run a step behind the one that ended at `begin`; returns when the host has issued it."""
        self._ends.clear()
        self._under_way.clear()
        last: dict[int, int] = {}
        for each in operations:
            issued += 0.0 if self.host is None else self.host(each)
            before = (self._ends.get(place, begin) for place in each.before.items())
            ready = max(issued, begin, *before) if each.before else max(issued, begin)
            if each.lane in last:
                ready = max(ready, self._ends[each.lane, last[each.lane]])
            self._ends[each.lane, each.number] = self._ended(each, ready)
            last[each.lane] = each.number
        return issued

    def _ended(self, each: Operation, ready: float) -> float:
        seconds = self.device(each)
        if each.members is None:
            if self.contention and seconds:
                most = seconds / max(1e-9, 1 - self.contention)
                beside = sum(max(0.0, end - max(ready, start)) for start, end in self._under_way)
                seconds = min(most, seconds + self.contention * beside)
            return ready + seconds
        name = self.link(each)
        start = max(ready, self._links.get(name, 0.0))
        self._links[name] = end = start + seconds
        self._under_way.append((start, end))
        return end
