"""`Board`: rows of a few numbers that ranks on one machine show each other, in memory that all of them see.

A row costs microseconds, and nobody's help: it is written, and read by who waits for it.  On Linux a rank that waits
sleeps until the row that it waits for is written (a futex); elsewhere it looks again after short naps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

from ndtp.collectives.symmetric.windows import is_alive

ROW = 64  # bytes
_CELL = struct.Struct(f"<q{ROW}sq")  # number, row, and a sum that tells a row from half of one
_TOLD = struct.Struct("<3q")  # of `shared_board`
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LOOKS_S = 2e-5, 1e-3, 0.5
_LIMIT = struct.pack("@ll", int(_LOOKS_S), int(_LOOKS_S % 1 * 1e9))  # struct timespec
_STUCK_S = 2.0  # a row that comes no sooner may never come
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None  # of `syscall`
_LOW = 2**32 - 1  # what a futex compares: the lower half of a row's number
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1

Row = bytes  # ROW of them


class Board:
    """A board of one row for each rank, in two turns: no rank shows a row before all have read the one before the
    last.

    Behind the rows is the number of the exchange to which all have come.  The last one to come writes it, and wakes
    those that sleep for it.

    Args:
        memory: of `num_bytes` bytes, shared by all.
        processes: of the ranks, by their ids.
        timeout: seconds that a row is waited for.
    """

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[int], timeout: float) -> None:
        self.memory, self.rank, self.processes, self.timeout = memory, rank, processes, timeout
        self.count = 0  # rows
        self._words = memoryview(memory).cast("q")
        self._all_came = 2 * len(processes) * _CELL.size // 8
        self._sleep = None if _FUTEX is None else Futex(memory, _FUTEX)

    @staticmethod
    def num_bytes(ranks: int) -> int:
        return 2 * ranks * _CELL.size + 8

    def exchange(self, row: Row, look: Callable[[Sequence[int]], None] = lambda missing: None) -> list[Row]:
        """The rows that all ranks show with this one, in their order.

        Args:
            look: called now and then with the ranks that are waited for, and may raise.

        Raises:
            Missing: names the ranks that have ended, or have shown nothing until the timeout.
        """
        self.count = count = self.count + 1
        memory, size, ranks = self.memory, _CELL.size, len(self.processes)
        start = count % 2 * ranks * size
        end, own, cell = (
            start + ranks * size,
            start + self.rank * size,
            _CELL.pack(count, row, crc32(row, count & _LOW)),
        )
        memory[own : own + size] = cell
        begin = looked = nap = 0.0
        alike = cell * ranks  # what is like this rank's own row to the last byte is complete
        while True:
            came, shown = self._words[self._all_came], memory[start:end]
            rows = [row] * ranks if shown == alike else self._rows(shown, count)
            if rows is not None:
                if came != count:
                    self._words[self._all_came] = count
                    if self._sleep is not None:
                        self._sleep.wake(self._all_came * 8)
                return rows
            now = time.monotonic()
            if not begin:  # a second look: two ranks that come at the same time may not have seen each other's row
                begin = looked = now
                continue
            if now - looked > _LOOKS_S:
                looked = now
                missing = [rank for rank in range(ranks) if not self._has_come(rank, start, count)]
                self._complain(missing, now - begin)
                if missing and now - begin > _STUCK_S:
                    look(missing)
            if self._sleep is not None and came != count:
                self._sleep.wait(self._all_came * 8, came & _LOW)
            else:  # half of a row is there
                time.sleep(nap)
                nap = min(max(_SHORTEST_NAP_S, (now - begin) / 8), _LONGEST_NAP_S)

    def _rows(self, shown: bytes, count: int) -> list[Row] | None:
        """The rows of an exchange, from what is on the board; None where one of them is still to come, in part or
        whole.
        """
        rows = []
        for number, row, total in _CELL.iter_unpack(shown):
            if number != count or total != crc32(row, count & _LOW):
                return None
            rows.append(row)
        return rows

    def _has_come(self, rank: int, start: int, count: int) -> bool:
        """Return whether a rank has shown its row, where that of the first one begins at a byte."""
        return _CELL.unpack_from(self.memory, start + rank * _CELL.size)[0] == count  # type: ignore[no-any-return]

    def _complain(self, missing: Sequence[int], waited: float) -> None:
        gone = [rank for rank in missing if not is_alive(self.processes[rank])]
        if gone or waited > self.timeout:
            raise Missing(gone or missing, "have ended" if gone else f"have not come in {waited:.0f} s")


class Futex:
    """Sleep until somebody writes to shared memory and wakes those who wait for it: Linux's futex(2).

    Args:
        number: of the system call.
    """

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        self._call: Any = ctypes.CDLL(None).syscall
        long, pointer, word = ctypes.c_long, ctypes.c_void_p, ctypes.c_uint
        self._call.argtypes = (long, pointer, ctypes.c_int, word, ctypes.c_char_p, pointer, word)
        self._number = number
        self._memory = ctypes.c_char.from_buffer(memory)  # held: it keeps the mapping where it is
        self._address = ctypes.addressof(self._memory)

    def wait(self, at: int, seen: int) -> None:
        """Return when woken, at once if the 32 bits at a byte are not `seen` any more, or after `_LOOKS_S`."""
        self._call(self._number, self._address + at, _WAIT, seen, _LIMIT, None, 0)

    def wake(self, at: int) -> None:
        self._call(self._number, self._address + at, _WAKE, _EVERYBODY, None, None, 0)


class Missing(RuntimeError):
    """Ranks of a group that are waited for in vain.

    Attributes:
        ranks: in the group.
        why: "have ended", or for how long they were waited for.
    """

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        super().__init__(f"ranks {', '.join(map(str, ranks))} of the group {why}")
        self.ranks: list[int] = list(ranks)
        self.why = why


def shared_board(rank: int, ranks: int, timeout: float, tell: Callable[[Row], list[Row]]) -> Board | None:
    """A board of all ranks of a group; None if they are not on one machine.  A collective of the group.

    Args:
        tell: what brings a row of each rank to all others, in some other way.
    """
    size = Board.num_bytes(ranks)
    # A file without a name, which its owner's process shows to others of this user; it goes with the last of them.
    own = -1
    with suppress(OSError, AttributeError):
        own = os.memfd_create("ndtp")
        os.ftruncate(own, size)
    token = int.from_bytes(os.urandom(7), "little")
    if own >= 0:
        os.pwrite(own, token.to_bytes(8, "little"), 0)
    told = [_TOLD.unpack_from(row) for row in tell(_TOLD.pack(own, os.getpid(), token).ljust(ROW))]
    first, memory = told[0], None
    with suppress(OSError, ValueError):
        file = own if rank == 0 else os.open(f"/proc/{first[1]}/fd/{first[0]}", os.O_RDWR)
        memory = mmap.mmap(file, size)
        if rank:
            os.close(file)
        if int.from_bytes(memory[:8], "little") != first[2]:  # another machine's process of that number
            memory = None
    is_there = memory is not None and all(is_alive(each[1]) for each in told)
    agreed = tell(bytes([is_there]).ljust(ROW))
    if own >= 0:
        os.close(own)
    if memory is None or not all(each[0] for each in agreed):
        return None
    return Board(memory, rank, [each[1] for each in told], timeout)
