"""How long processes waited for a processor, as the kernel counts it: tells a rank that is stuck from a starved one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


class Starved:
    """The seconds that processes were ready to run and did not, since this was made.

    A process that is stuck in a wait is not ready, and adds nothing: a limit that is lengthened by these seconds still
    ends.  Of a process, the thread that waited the longest counts.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._before: dict[tuple[int, str], float] = {}
        self._most: dict[int, float] = {}
        for pid in pids:
            self._before |= {(pid, thread): seconds for thread, seconds in _waits(pid).items()}
            self._most[pid] = 0.0

    def seconds(self) -> float:
        """Return the sum over the processes, which may have waited for each other in turn."""
        for pid in self._most:
            waits = _waits(pid)
            since = [seconds - self._before.get((pid, thread), 0.0) for thread, seconds in waits.items()]
            self._most[pid] = max([self._most[pid], *since])  # what a process had waited when it ended stays
        return sum(self._most.values())


def _waits(pid: int) -> dict[str, float]:
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return found
