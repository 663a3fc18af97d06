"""Local gloo ranks that are started once and called many times.

    with RankPool(8) as pool:
        losses = pool.run(train_step, config)        # [loss of rank 0, ..., loss of rank 7]

A call never hangs: the first rank that fails, dies or exceeds the timeout ends it for all.  The ranks are then killed
(a gloo group does not survive the loss of a member), and the next call starts new ones, in about a tenth of a second.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from multiprocessing.connection import Connection, wait
from typing import Any

from ndtp.testing.messages import (
    IMPORTING_MAIN,
    Birth,
    CallMessage,
    Printed,
    Raised,
    Ready,
    Returned,
    describe_main,
    home_of,
    pickle_call,
)
from ndtp.testing.process import RankProcess, kill, place_in, traces
from ndtp.testing.rank_asserts import settings
from ndtp.testing.rank_error import RankError, RankTimeout
from ndtp.testing.zygote import Zygote

_START_TIMEOUT_S = 180.0  # importing torch on a cold, busy machine included
_STARTS = 3  # of the ranks for one call, should whoever forks them be killed meanwhile
_LONGEST_WAIT_S = 86400.0  # the operating system takes 24 days at most
_GRACE_S = 0.5  # after the first failure, for the others to report theirs
_MOST_THREADS = 100  # of one rank; a process group of gloo has three or four


class RankPool:
    """`ranks` processes in one gloo group, with one torch thread each.

    They start at the first call and are reused by the later ones, until calls have left so many process groups behind
    that gloo's threads, which never sleep for long, slow everybody down; then fresh ones start.  Each call finds the
    default process group initialised, the parent's `sys.path` and working directory as they are then, its environment
    as it was when the ranks started, and torch's seed at 0; everything else that calls leave behind stays.

    Args:
        ranks: number of processes.
        timeout: seconds that a call may take, unless it says otherwise.  The group's own timeout is no shorter.
        echo: the ranks whose `print` goes to the parent's `sys.stdout`; the default is rank 0 alone.  stderr always
            goes through.

    Raises:
        ValueError: `ranks` is not positive.
    """

    def __init__(self, ranks: int, timeout: float = 300.0, *, echo: Collection[int] = (0,)) -> None:
        if ranks < 1:
            raise ValueError(f"RankPool: ranks must be at least 1, not {ranks}")
        self.num_ranks = ranks
        self.timeout = timeout
        self._echo = frozenset(echo)
        self._ranks: list[RankProcess] = []
        self._reusable = False
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, kill, self._ranks, os.getpid())

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no ranks are running."""
        return [rank.process_id() for rank in self._ranks]

    def close(self) -> None:
        """Kill the ranks.  A later call starts new ones."""
        with self._lock:
            kill(self._ranks, os.getpid())

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        wait_all: bool = False,
        axes: Mapping[str, int] | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results by rank.

        Tensors among the results arrive on the CPU, detached.

        Args:
            fn: a function that can be imported by its name: at module level, of a module or of the main script.
            timeout: seconds; the pool's by default.
            wait_all: after a failure, wait for all ranks to finish or fail, instead of half a second.
            axes: axis sizes, slowest first, so that errors can name the failing rank's coordinates.
            per_rank: for each rank, the arguments that precede `args`.

        Raises:
            ValueError: `fn` cannot be imported, or an argument not pickled, by another process.
            RankTimeout: the timeout passed; names the ranks still running, and where.
            RankError: a rank raised or died.
        """
        __tracebackhide__ = True  # pytest: the frames of interest are in the ranks
        return self.call(fn, args, kwargs, timeout=timeout, wait_all=wait_all, axes=axes, per_rank=per_rank)

    def call(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        timeout: float | None = None,
        wait_all: bool = False,
        axes: Mapping[str, int] | None = None,
        per_rank: Sequence[tuple[object, ...]] | None = None,
    ) -> list[Any]:
        """`run` for functions whose keyword arguments have the names of its own."""
        __tracebackhide__ = True
        if IMPORTING_MAIN.get():
            raise RuntimeError(
                "the main script starts ranks while a rank imports it, which would never end\n"
                '  fix: put what the script does under `if __name__ == "__main__":`'
            )
        if per_rank is not None and len(per_rank) != self.num_ranks:
            raise ValueError(f"per_rank has {len(per_rank)} entries for {self.num_ranks} ranks")
        if axes is not None and prod(axes.values()) != self.num_ranks:
            raise ValueError(f"axes {dict(axes)} make {prod(axes.values())} ranks, but the pool has {self.num_ranks}")
        if per_rank is None:
            payloads = [pickle_call(fn, tuple(args), dict(kwargs or {}))] * self.num_ranks
        else:
            payloads = [pickle_call(fn, (*first, *args), dict(kwargs or {})) for first in per_rank]
        main = describe_main() if any(b"__main__" in payload for payload in payloads) else None
        timeout = self.timeout if timeout is None else timeout
        with self._lock:
            try:
                self._ensure_started()
                place, test = (list(sys.path), os.getcwd(), main), settings()
                home = None if test is None else home_of(fn)
                headers = {echo: pickle.dumps(CallMessage(*place, echo, test, home)) for echo in (False, True)}
                for rank, payload in zip(self._ranks, payloads, strict=True):
                    with contextlib.suppress(OSError):  # it just died: _collect reports it
                        rank.connection.send_bytes(headers[rank.index in self._echo] + payload)
                results = self._collect(timeout, timeout if wait_all else _GRACE_S, axes)
                if self._ranks and _num_threads(self._ranks[0].pid) > _MOST_THREADS:
                    kill(self._ranks, os.getpid())
                return results
            except BaseException:  # KeyboardInterrupt too
                kill(self._ranks, os.getpid())
                raise

    def _ensure_started(self) -> None:
        zygote = _zygote(os.getpid())
        # An idle rank has nothing to say: a message is the end of its connection, seen a little before its exit code.
        if (
            self._ranks
            and self._reusable
            and zygote.answers()
            and not any(r.poll_exit() or self._receive(r, {}) for r in self._ranks)
        ):
            return
        if os.environ.get("NDTP_TEST_DEVICE"):  # else nothing here needs torch
            from ndtp.testing.device import prepare_test_device

            prepare_test_device()
        for attempt in range(1, _STARTS + 1):
            kill(self._ranks, os.getpid())
            folder = zygote.ensure_running()
            try:
                return self._start(zygote, folder)
            except RuntimeError:  # nothing of the call has been done yet: it may start again
                if attempt == _STARTS or not zygote.is_lost(folder):
                    raise

    def _start(self, zygote: Zygote, folder: str) -> None:
        self._reusable = True
        # Never a name that was there before: ranks that were killed leave their store behind, which would tell the next
        # ones where to find ranks that are gone.
        stem = os.path.join(folder, str(next(zygote.numbers)))
        for index in range(self.num_ranks):
            ours, theirs = socket.socketpair()
            status_read, status_write = os.pipe()
            rank = RankProcess(index, Connection(ours.detach()), status_read, f"{stem}-{index}.trace")
            self._ranks.append(rank)
            birth = Birth(
                rank=index,
                num_ranks=self.num_ranks,
                store_path=f"{stem}.store",
                trace_path=rank.trace_path,
                group_timeout_s=max(self.timeout, _START_TIMEOUT_S),
                environ=dict(os.environ),
                argv=list(sys.argv),
            )
            try:
                zygote.fork(folder, birth, theirs.fileno(), status_write)
            finally:
                theirs.close()
                os.close(status_write)
        self._collect(_START_TIMEOUT_S, _GRACE_S, None)

    def _collect(self, timeout: float, grace: float, axes: Mapping[str, int] | None) -> list[object]:
        """Wait for one final message of every rank."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        waiting_until = deadline
        results: dict[int, object] = {}
        failures: dict[int, Raised] = {}
        pending = {rank.index: rank for rank in self._ranks}
        while pending:
            sources = [source for r in pending.values() for source in (r.connection, r.status_fd)]
            ready = wait(sources, min(max(0.0, waiting_until - time.monotonic()), _LONGEST_WAIT_S))
            if not ready and time.monotonic() >= waiting_until:
                break
            for rank in list(pending.values()):
                if rank.connection not in ready and rank.status_fd not in ready:
                    continue
                # In this order: what it said before it ended is already in the socket once we see the end.
                ended = rank.status_fd in ready and rank.poll_exit()
                message = self._receive(rank, results)
                if message is None and ended:
                    message = rank.death()
                if message is None:
                    continue
                del pending[rank.index]
                if isinstance(message, Raised):
                    failures[rank.index] = message
                    waiting_until = min(waiting_until, time.monotonic() + grace)
        if not pending and not failures:
            return [results.get(rank.index) for rank in self._ranks]

        error_type = RankError if failures else RankTimeout
        if pending and time.monotonic() >= deadline:
            for index, trace in traces(pending.values()).items():
                summary = f"still running after {timeout:g} s, {place_in(trace)}"
                failures[index] = Raised(summary, trace, None, time.monotonic())
        first = min(failures, key=lambda index: (failures[index].when, index))
        raise error_type(
            first,
            {index: failure.traceback or failure.summary for index, failure in sorted(failures.items())},
            axes=axes,
            exceptions=_exceptions(failures),
            summaries={index: failure.summary for index, failure in failures.items()},
            stopped=pending,
            reports={index: failure.report for index, failure in failures.items() if failure.report},
            printed={index: failure.printed for index, failure in failures.items() if failure.printed},
        )

    def _receive(self, rank: RankProcess, results: dict[int, object]) -> Ready | Returned | Raised | None:
        """The rank's final message if it has arrived; passes on what it printed before."""
        while True:
            try:
                if not rank.connection.poll():
                    return None
                stream = io.BytesIO(rank.connection.recv_bytes())
            except (EOFError, OSError):  # closed: it has ended or is about to
                return rank.death()
            message = pickle.load(stream)
            if isinstance(message, Printed):
                sys.stdout.write(message.text)
                sys.stdout.flush()
                continue
            if isinstance(message, Returned):
                self._reusable &= message.reusable
                results[rank.index] = pickle.load(stream)
            return message


def _exceptions(failures: Mapping[int, Raised]) -> dict[int, BaseException]:
    exceptions = {}
    for index, failure in failures.items():
        if failure.exception is not None:
            with contextlib.suppress(Exception):  # of a class that only the rank could import, say
                exceptions[index] = pickle.loads(failure.exception)
    return exceptions


def _num_threads(pid: int) -> int:
    """0 where the process is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def shared_pool(ranks: int) -> RankPool:
    """The pool of `ranks` ranks that everyone in this process shares."""
    pools = _shared_pools(os.getpid())
    if ranks not in pools:
        pools[ranks] = RankPool(ranks)
    return pools[ranks]


def close_shared_pools() -> None:
    """Kill the ranks of all shared pools; a later call starts new ones."""
    for pool in _shared_pools(os.getpid()).values():
        pool.close()


@functools.cache
def _shared_pools(pid: int) -> dict[int, RankPool]:  # by pid: a fork must not use its parent's ranks
    return {}


@functools.cache
def _zygote(pid: int) -> Zygote:
    return Zygote()
