"""A switch in user space between network namespaces, whose links lose, delay, reorder and throttle frames.

A kernel without netem has TAP devices: every rank's namespace has one, and this process carries each frame from one to
the other, or does not.  What happens is drawn from a seed, by rank and time.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SUBNET = "10.78.0"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_QUEUE_S = 1.0  # of what waits in front of a narrow link; more is lost


@dataclass(frozen=True)
class Weather:
    """The state of the links of some ranks for some time.

    Attributes:
        ranks: whose frames are concerned, in both directions; () for all.
        between: only frames from one of them to another.
        begin, end: seconds after the ranks began to work.
        loss: share of the frames that are lost.
        delay_ms, jitter_ms: of each frame; jitter is drawn for each, so that frames overtake one another.
        late_share: of the frames, delayed by jitter; the others are not.
        rate: bytes per second; 0: no limit.
        gone: no frame passes.
    """

    ranks: tuple[int, ...] = ()
    between: bool = False
    begin: float = 0.0
    end: float = 1e9
    loss: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    late_share: float = 1.0
    rate: float = 0.0
    gone: bool = False


def run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


@contextlib.contextmanager
def cluster(ranks: int) -> Iterator[tuple[list[str], list[int]]]:
    """Namespaces with a TAP device each; yields their names and the other ends of the devices."""
    tag = f"nt{os.getpid() % 100000}"
    names, ends = [f"{tag}n{i}" for i in range(ranks)], list[int]()
    try:
        for i, name in enumerate(names):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            ends.append(end)
            device = f"{tag}t{i}"
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI))
            run("ip", "netns", "add", name)
            run("ip", "link", "set", device, "netns", name)
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "link", "set", device, "name", "eth0", "address", mac(i))
            run(*inside, "ip", "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            run(*inside, "ip", "link", "set", "eth0", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            for j in range(ranks):  # nobody asks who is who, and so nobody is lost for want of an answer
                if j != i:
                    run(*inside, "ip", "neigh", "replace", f"{SUBNET}.{j + 1}", "lladdr", mac(j), "dev", "eth0")
        yield names, ends
    finally:
        for end in ends:
            os.close(end)  # the device goes with it
        for name in names:
            run("ip", "netns", "del", name, check=False)


def mac(rank: int) -> str:
    return f"02:00:00:00:00:{rank + 1:02x}"


class Switch:
    """Carries frames until it is told to stop.

    Args:
        ends: of the ranks' devices.
        weather: what happens; where several fit, all of it does.
        began: when the ranks began to work (`time.monotonic`), or None if they have not.

    Attributes:
        carried, lost, late: frames.
    """

    def __init__(self, ends: list[int], weather: list[Weather], seed: int, began: Callable[[], float | None]) -> None:
        self._ends, self._weather, self._draw, self._began = ends, weather, random.Random(seed), began
        self._due: list[tuple[float, int, int, bytes]] = []
        self._free_at = dict[tuple[int, bool], float]()  # of a narrow link, by rank and direction
        self._count = self.carried = self.lost = self.late = 0

    def serve(self, until: Callable[[], bool]) -> None:
        by_address = {bytes.fromhex(mac(i).replace(":", "")): i for i in range(len(self._ends))}
        poll = select.poll()
        for end in self._ends:
            poll.register(end, select.POLLIN)
        rank_of = {end: i for i, end in enumerate(self._ends)}
        while not until():
            now = time.monotonic()
            wait = 50.0 if not self._due else min(50.0, max(0.0, (self._due[0][0] - now) * 1e3))
            for end, _ in poll.poll(wait):
                for _ in range(64):
                    try:
                        frame = os.read(end, 2048)
                    except OSError:
                        break
                    to = by_address.get(frame[:6])
                    if to is not None:
                        self._take(rank_of[end], to, frame)
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, to, frame = heapq.heappop(self._due)
                with contextlib.suppress(OSError):  # a namespace whose rank has ended
                    os.write(self._ends[to], frame)
                self.carried += 1

    def _take(self, source: int, to: int, frame: bytes) -> None:
        now, began = time.monotonic(), self._began()
        when = now
        for each in self._weather if began is not None else ():
            mine = [rank for rank in (source, to) if not each.ranks or rank in each.ranks]
            if not mine or (each.between and len(mine) < 2) or not each.begin <= now - began < each.end:
                continue
            if each.gone or self._draw.random() < each.loss:
                self.lost += 1
                return
            if each.rate:
                for rank in mine:
                    key = rank, rank == source
                    start = max(when, self._free_at.get(key, 0.0))
                    if start - now > _QUEUE_S:
                        self.lost += 1
                        return
                    when = self._free_at[key] = start + len(frame) / each.rate
            when += each.delay_ms / 1e3
            if each.jitter_ms and self._draw.random() < each.late_share:
                when += self._draw.random() * each.jitter_ms / 1e3
        self.late += when > now
        self._count += 1
        heapq.heappush(self._due, (when, self._count, to, frame))
