"""Progress of a command: a bar on a terminal, or a line on standard error every few seconds in a pipe or a log.

For calls on ranks, rank 0 counts what is done in a file, and this process shows it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

POLL_S = 0.2
LINE_S = 5.0  # between lines, where there is no terminal
CALL_TIMEOUT_S = 900.0


class Bar:
    """A progress bar: the current work, how much is done, and the time that is left.

    with Bar(console, "rounds", total=10) as bar, bar.following(count):
        ...     # count() tells how many are done

    Args:
        unit: how many of what each of them is, for a speed: (4096, "tokens").
        below: what stands below the bar, asked for whenever it is drawn.
    """

    def __init__(
        self,
        console: Console,
        what: str,
        total: int,
        unit: tuple[float, str] | None = None,
        below: Callable[[], Any] | None = None,
    ) -> None:
        from rich import progress as bars

        class Progress(bars.Progress):
            def get_renderables(self) -> Iterator[Any]:
                yield from super().get_renderables()
                if below is not None:
                    yield below()

        self.unit = unit
        self.what, self.total, self.done = what, total, 0
        self._begin = self._said = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._says = not console.quiet and not console.is_terminal
        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=30),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=self._says)
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, what: str | None = None) -> None:
        if self._first is None and done:
            self._first = done, time.monotonic()
        self.done, self.what = done, what or self.what
        self._progress.update(self._task, completed=done, description=f"{self.what}{self._speed()}")
        now = time.monotonic()
        if self._says and now - self._said >= LINE_S:
            self._said, spent = now, now - self._begin
            left = f", about {spent * (self.total - done) / done:.0f} s left" if done else ""
            said = f"{self.what}{self._speed()}: {done} of {self.total} done in {spent:.0f} s{left}"
            print(said, file=sys.stderr, flush=True)

    def _speed(self) -> str:
        """Since the first that was done, which may be many at once."""
        if self.unit is None or self._first is None or self.done == self._first[0]:
            return ""
        each, name = self.unit
        speed = each * (self.done - self._first[0]) / max(time.monotonic() - self._first[1], 1e-9)
        return f", {speed:,.0f} {name} a second"

    @contextmanager
    def following(self, done: Callable[[], int]) -> Iterator[None]:
        """A thread updates the bar: the main one waits for the ranks."""
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(POLL_S):
                self.update(done())

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()
            self.update(done())


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show that something runs that does not tell how far it is."""
    if console.is_terminal or console.quiet:
        with console.status(what):
            yield
        return
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield


@dataclass(frozen=True)
class Counter:
    """A counter that a function on the ranks calls to say how far it is."""

    path: str

    def advance(self, steps: int = 1) -> None:
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_rank() == 0:
            with open(self.path, "ab") as file:
                file.write(b"." * steps)


class Runner:
    """Calls functions on local ranks, or on torchrun's, under one bar.

    with Runner(console, ranks=8, total=100) as runner:
        results = runner.run("grid x=8", work, grid)    # calls work(counter, grid) on every rank
    """

    def __init__(
        self,
        console: Console,
        ranks: int,
        total: int,
        unit: tuple[float, str] | None = None,
        below: Callable[[], Any] | None = None,
    ) -> None:
        self.ranks = ranks
        self.bar = Bar(console, "starting ranks", total, unit, below)

    def __enter__(self) -> Runner:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    def run(
        self,
        what: str,
        fn: Callable[..., Any],
        *args: Any,
        axes: Mapping[str, int] | None = None,
        timeout: float = CALL_TIMEOUT_S,
    ) -> list[Any]:
        """`fn(counter, *args)` on every rank; the results by rank."""
        from ndtp.testing import run

        start = self.bar.done
        self.bar.update(start, what)
        handle, path = tempfile.mkstemp(prefix="ndtp-progress-")
        os.close(handle)
        try:
            with self.bar.following(lambda: start + os.path.getsize(path)):
                return run(fn, self.ranks, args=(Counter(path), *args), timeout=timeout, axes=axes)
        finally:
            os.unlink(path)
