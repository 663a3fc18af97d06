"""The state of another rank's process, as this machine's kernel knows it: running, stopped, or gone."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

RUNNING, STOPPED, GONE = "running", "stopped", "gone"
_EXITING = 0x4  # of Linux's PF_EXITING; it is there before the process's connections are closed


@dataclass(frozen=True)
class Identity:
    """A rank's process.

    Attributes:
        machine: what processes share that can look at each other and have one monotonic clock: one boot of one kernel,
            one namespace of process ids and one of clocks.
        begun: when it started, in ticks since the boot: another process may get its id.
    """

    rank: int
    host: str
    machine: str
    pid: int
    begun: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def own_identity(rank: int) -> Identity:
    pid = os.getpid()
    status = _status(pid)
    return Identity(rank, socket.gethostname(), machine(), pid, status[1] if status else 0)


@cache
def machine() -> str:
    """A name of this kernel's boot and of the namespaces of process ids and clocks; one of its own without them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        clocks = Path("/proc/self/ns/time")  # of Linux 5.6 and later
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{clocks.stat().st_ino if clocks.exists() else 0}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


def state_of(who: Identity) -> str:
    """`RUNNING`, `STOPPED` (as by SIGSTOP) or `GONE`, of a process of this machine."""
    status = _status(who.pid)
    if status is None or status[1] != who.begun or status[0] in "ZX" or status[2]:
        return GONE
    return STOPPED if status[0] == "T" else RUNNING


def open_pidfd(who: Identity) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there is none, or it is gone already."""
    try:
        descriptor = os.pidfd_open(who.pid)
    except (AttributeError, OSError):
        return None
    if state_of(who) == GONE:
        os.close(descriptor)
        return None
    return descriptor


def _status(pid: int) -> tuple[str, int, bool] | None:
    """State and start of a process, and whether it is about to end."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[19]), bool(int(fields[6]) & _EXITING)
    except (OSError, IndexError, ValueError):
        return None
