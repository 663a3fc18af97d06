"""A progress bar over calls on ranks: rank 0 counts what is done in a file, this process draws it."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ndtp.testing import run

POLL_S = 0.2
CALL_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Counter:
    """What a function on the ranks calls to say how far it is."""

    path: str

    def advance(self, steps: int = 1) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            with open(self.path, "ab") as file:
                file.write(b"." * steps)


class Runner:
    """Calls functions on local ranks, or on torchrun's, under one progress bar with the time left.

    with Runner(console, ranks=8, total=100) as runner:
        results = runner.run("grid x=8", work, grid)    # calls work(counter, grid) on every rank
    """

    def __init__(self, console: Console, ranks: int, total: int) -> None:
        self.ranks = ranks
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("starting ranks", total=total)

    def __enter__(self) -> Runner:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def run(self, what: str, fn: Callable[..., Any], *args: Any, axes: Mapping[str, int] | None = None) -> list[Any]:
        """`fn(counter, *args)` on every rank; the results by rank."""
        self.progress.update(self.task, description=what)
        handle, path = tempfile.mkstemp(prefix="ndtp-progress-")
        os.close(handle)
        start = self.progress.tasks[0].completed
        finished = threading.Event()

        def follow() -> None:
            while not finished.wait(POLL_S):
                self.progress.update(self.task, completed=start + os.path.getsize(path))

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            return run(fn, self.ranks, args=(Counter(path), *args), timeout=CALL_TIMEOUT_S, axes=axes)
        finally:
            finished.set()
            follower.join()
            self.progress.update(self.task, completed=start + os.path.getsize(path))
            os.unlink(path)
