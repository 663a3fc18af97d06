"""The parent's handle on one rank: is it alive, how did it end, where is it stuck."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from ndtp.testing.messages import TRACE_SIGNAL, Raised
from ndtp.testing.zygote import STATUS

_DEATH_S = 5.0  # for a killed process to disappear
_TRACE_S = 0.3  # for a stuck rank to write its stack


@dataclass
class RankProcess:
    """A rank as the parent sees it."""

    index: int
    connection: Connection
    status_fd: int
    trace_path: str
    pid: int = 0
    exit_code: int | None = None
    alive: bool = True
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        os.set_blocking(self.status_fd, False)

    def poll_exit(self, timeout: float = 0.0) -> bool:
        """Return whether the process has ended."""
        while self.alive and self._read_status(timeout):
            pass
        return not self.alive

    def _read_status(self, timeout: float) -> bool:
        """Read the next record of the status pipe, where the zygote writes the pid and then the exit code."""
        if not wait([self.status_fd], timeout):
            return False
        with self._lock:
            try:
                record = os.read(self.status_fd, STATUS.size)
            except BlockingIOError:  # another thread that waited has read it
                return True
            if record and not self.pid:
                self.pid = STATUS.unpack(record)[0]
                return True
            self.alive = False  # with no record: the zygote was killed, and its ranks with it
            if record:
                self.exit_code = STATUS.unpack(record)[0]
            return True

    def process_id(self) -> int:
        """Return the process id of a rank, which may be still to be forked, or whose id is still to be read."""
        until = time.monotonic() + _DEATH_S
        while not self.pid and self.alive and time.monotonic() < until:
            self._read_status(0.05)  # another thread may read it meanwhile
        return self.pid

    def signal(self, number: int) -> None:
        self.process_id()
        self.poll_exit()
        if self.pid and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def trace(self) -> str:
        """Return the stack that faulthandler wrote at a crash or at TRACE_SIGNAL, without the frames of
        ndtp.testing.
        """
        with contextlib.suppress(OSError), open(self.trace_path) as file:
            ours = ('File "<string>"', f'File "{os.path.dirname(__file__)}')
            return "".join(line for line in file if not line.strip().startswith(ours))
        return ""

    def death(self) -> Raised:
        """Return how the rank ended, as an error that goes before others, which may only have lost this rank."""
        self.poll_exit(_DEATH_S)
        return Raised(self._describe_exit(), self.trace(), None, when=-1.0)

    def _describe_exit(self) -> str:
        if not self.pid:
            return "never started: the process that starts the ranks died; its stderr says why"
        if self.exit_code is None:
            return f"lost its connection (pid {self.pid})"
        if self.exit_code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-self.exit_code).name} (pid {self.pid})"
        return f"ended by itself with exit code {self.exit_code} (pid {self.pid}), without raising"


def place_in(trace: str) -> str:
    """The innermost frame of a trace, in a few words: "in all_reduce (distributed_c10d.py:3000)".

    Of several threads it is that of the main one, which answers signals; others watch.
    """
    main = trace.find("Current thread")
    frame = re.search(r'File "(?:.*/)?(.+)", line (\d+) in (.+)', trace[max(main, 0) :])
    return f"in {frame[3]} ({frame[1]}:{frame[2]})" if frame else "at an unknown place"


def traces(ranks: Collection[RankProcess]) -> dict[int, str]:
    """Return the stacks of running ranks."""
    for rank in ranks:
        rank.signal(TRACE_SIGNAL)
    time.sleep(_TRACE_S)
    return {rank.index: rank.trace() or "(no Python stack: it did not answer the signal)" for rank in ranks}


def kill(ranks: list[RankProcess], owner_pid: int) -> None:
    """Kill the ranks, wait until they are gone, and empty the list."""
    if os.getpid() != owner_pid:
        return
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    for rank in ranks:
        rank.connection.close()
        rank.poll_exit(_DEATH_S)
        os.close(rank.status_fd)
        with contextlib.suppress(OSError):
            os.unlink(rank.trace_path)
    ranks.clear()
