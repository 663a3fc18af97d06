"""The faults that `faults.py` puts into one of four ranks: what happens, when, and what the others may say of it.

A fault that no code of the victim takes part in (killed, exited, stopped, cut) comes from a thread of it at a random
time, in the middle of whatever the victim does; one that its code makes (an exception, memory, a sleep) comes at a
random step, and in saves and loads at a random call inside.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ndtp.runtime.recheck import PRODUCTS

RANKS, STEPS, LATEST_S = 4, 6, 0.25
HARMLESS_STEPS = 12  # of a program that nothing must happen to
EVERYWHERE = ("train", "generate", "experts", "pipeline", "start", "save", "load")
TRAINED, STEPPED, COMPUTED = ("train", "experts", "pipeline"), ("train",), ("train", "generate", "experts")
REAL_TIME = time.time


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        how: what survivors may say of the victim; () where nothing must happen to them.
        places: the programs into which it is put.
        at_any_time: it comes from outside of the program's own code.
        timeout: of the grid, seconds: short where it is what ends the survivors.
    """

    how: tuple[str, ...]
    places: tuple[str, ...] = EVERYWHERE
    at_any_time: bool = False
    timeout: float = 20.0


KINDS = {
    "killed": Kind(("gone",), at_any_time=True),  # as by a kernel that is out of memory
    "crashed": Kind(("gone",), at_any_time=True),  # SIGSEGV
    "terminated": Kind(("gone", "ended"), at_any_time=True),  # SIGTERM
    "exited": Kind(("gone",), at_any_time=True),  # os._exit
    "left": Kind(("ended",)),  # sys.exit(0), in silence
    "raised": Kind(("raised",)),
    "in backward": Kind(("raised",), TRAINED),  # an exception in a hook of autograd
    "in optimizer": Kind(("raised",), STEPPED),
    "loader raised": Kind(("raised",), STEPPED),  # in a worker process of a DataLoader
    "loader killed": Kind(("raised",), STEPPED),
    "out of memory": Kind(("raised",)),  # an allocation fails
    "disk full": Kind(("raised",), ("save",)),
    "folder gone": Kind(("raised",), ("save",)),
    "stopped": Kind(("stopped",), at_any_time=True, timeout=3.0),
    "late": Kind(("behind",), timeout=3.0),  # time.sleep
    "cut": Kind(("link", "gone", "absent", "behind", "raised"), at_any_time=True),
    "clock": Kind(("gone",), at_any_time=True),  # killed, while the clock of another rank is wrong by an hour
    "paused": Kind(()),  # SIGSTOP, and SIGCONT a second later
    "thread": Kind(()),  # an exception in a thread beside the program
    "nan": Kind(("nan",), COMPUTED),  # under `find_nonfinite`
    "flipped bit": Kind(("corrupt",), COMPUTED),  # in a product, under `recheck=`
}


class Fault(Exception):
    """An error of the user's own program."""


class Named(Exception):
    """What a look at the numbers has found.

    Attributes:
        how, ranks: as of a `CommunicationError`.
    """

    def __init__(self, how: str, ranks: tuple[int, ...]) -> None:
        super().__init__(f"{how} on {ranks}")
        self.how, self.ranks = how, ranks


@dataclass(frozen=True)
class Plan:
    """Which rank fails, how and when: after `seconds` of the loop, or at its step `at`.

    Attributes:
        port: where the ranks meet; 0: in a file.
        kind: of `KINDS`; "" of a program that nothing happens to.
    """

    kind: str
    victim: int
    at: int
    seconds: float
    timeout: float
    port: int

    @property
    def is_mine(self) -> bool:
        return dist.get_rank() == self.victim

    @property
    def is_harmless(self) -> bool:
        return not self.kind or not KINDS[self.kind].how

    @property
    def is_at_any_time(self) -> bool:
        return bool(self.kind) and KINDS[self.kind].at_any_time

    def steps(self) -> Iterator[int]:
        """The steps of a program that goes on until the fault is there; it starts with the first."""
        if self.kind == "clock" and dist.get_rank() == (self.victim + 1) % RANKS:
            hour = 3600.0 if self.at % 2 else -3600.0
            time.time = lambda: REAL_TIME() + hour
        if self.is_mine and self.is_at_any_time:
            threading.Thread(target=self._later, daemon=True).start()
        return iter(range(HARMLESS_STEPS)) if self.is_harmless else itertools.count()

    def _later(self) -> None:
        time.sleep(self.seconds)
        fail(self.kind)
        while True:  # what is connected anew is cut, too
            time.sleep(0.02)
            cut()

    def is_due(self, step: int) -> bool:
        return self.is_mine and bool(self.kind) and not self.is_at_any_time and step == self.at

    def at_step(self, step: int, x: Tensor | None = None) -> None:
        """Where the victim's own code fails.

        Args:
            x: a tensor of the program, for a fault that spoils one.
        """
        if not self.is_due(step) or self.kind in ("in backward", "in optimizer", "loader raised", "loader killed"):
            return
        if self.kind == "nan":
            note()
            if x is not None:
                with torch.no_grad():
                    x.view(-1)[0] = torch.nan
        elif self.kind != "flipped bit":
            fail(self.kind)

    def in_backward(self, step: int, y: Tensor) -> None:
        if self.is_due(step) and self.kind == "in backward":
            y.register_hook(lambda grad: fail("raised"))

    def in_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.is_mine and self.kind == "in optimizer":
            count = itertools.count()
            optimizer.register_step_pre_hook(lambda *_: fail("raised") if next(count) == self.at else None)

    def loader(self, x: Tensor) -> Iterator[Tensor]:
        """The input of each step: of the victim by a worker process, which fails."""
        if self.is_mine and self.kind.startswith("loader"):
            items: Any = _Items(x, self)
            return iter(torch.utils.data.DataLoader(items, batch_size=None, num_workers=1, prefetch_factor=1))
        return itertools.repeat(x)

    def flips(self) -> None:
        """Have one product of the victim's with a bit that is wrong."""
        if self.is_mine and self.kind == "flipped bit":
            _Flipping(self.at).__enter__()


class _Items(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, x: Tensor, plan: Plan) -> None:
        self.x, self.plan = x, plan

    def __iter__(self) -> Iterator[Tensor]:
        for step in itertools.count():
            if step == self.plan.at:
                fail("raised" if self.plan.kind == "loader raised" else "killed")
            yield self.x.clone()


class _Flipping(TorchDispatchMode):
    """One product of torch's comes with a bit that is wrong."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS and result.numel() and result.dtype is torch.float32:
            self.left -= 1
            if self.left == -1:
                note()
                first = result.detach()[(0,) * result.dim()].view(torch.int32)
                first ^= 1 << 29  # of the exponent
        return result


def note() -> None:
    Path(tempfile.gettempdir(), "fault").write_text(str(REAL_TIME()))


def fail(kind: str) -> None:
    note()
    if kind in ("killed", "clock"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "crashed":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "exited":
        os._exit(3)
    elif kind == "left":
        sys.exit(0)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "paused":
        threading.Thread(target=_pause, daemon=True).start()
    elif kind == "thread":
        threading.Thread(target=fail, args=("raised",), daemon=True).start()
    elif kind == "raised":
        raise Fault("the program's own")
    elif kind == "out of memory":
        torch.empty(2**50)
    elif kind == "disk full":
        raise OSError(errno.ENOSPC, "No space left on device")
    elif kind == "folder gone":
        for each in Path(tempfile.gettempdir()).glob("checkpoint.partial*"):
            while each.exists():  # another rank may make a file in it meanwhile
                shutil.rmtree(each, ignore_errors=True)
    elif kind == "late":
        time.sleep(600)
    else:
        cut()


def _pause() -> None:
    """Stop this process for a second, at a moment that its program does not know."""
    pid = os.getpid()
    time.sleep(0.003)
    if os.fork() == 0:
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def cut() -> None:
    """Every connection of this rank is gone, as with its network card; the process is there."""
    for number in os.listdir("/proc/self/fd"):
        try:
            link = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue
        with link:
            if link.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):
                    if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        link.shutdown(socket.SHUT_RDWR)
