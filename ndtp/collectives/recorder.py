"""The work of a rank, named and timed: ranges for profilers, and a recorder that writes down the times itself.

Local work stands in `with span(...)`.  A collective has a range where it is issued, one where it is waited for and one
around the local work that finishes it: `ndtp::all_gather[y] 2/4 mlp.up A`, `ndtp::wait all_gather[y] ...`,
`ndtp::finish all_gather[y] ...`.  `torch.profiler` shows them, and `torch.autograd.profiler.emit_nvtx` hands them to
Nsight.  Where nobody looks, a span costs two look-ups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

if TYPE_CHECKING:
    from torch import Tensor

    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.handles import Begin, Started
    from ndtp.collectives.labels import Label

NOTHING: AbstractContextManager[None] = nullcontext()
PREFIX = "ndtp::"


@dataclass(frozen=True)
class Span:
    """Something that lasted.

    Attributes:
        kind: "compute", "wait" (a collective was not done when its result was needed), or "collective" (its whole
            flight, from issue to completion).
        name: what profilers show, without "ndtp::".
        phase: of a collective or a wait: "forward", "dgrad" or "wgrad".
        axes: of a collective or a wait: the axes of the grid that it runs over.
        start, end: seconds.
    """

    kind: str
    name: str
    phase: str
    axes: tuple[str, ...]
    start: float
    end: float


class Recording:
    """The recorder of a process grid, if there is one.

    Of the grid and not of a thread: backward may run in threads of autograd's own.

    Attributes:
        inspector: is given each tensor that a collective is about to send, and what for.
    """

    __slots__ = ("inspector", "recorder")

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.inspector: Callable[[Label, Tensor], None] | None = None

    def inspect(self, label: Label, tensor: Tensor) -> None:
        if self.inspector is not None:
            self.inspector(label, tensor)


class Recorded(Protocol):
    """The part of `Collectives` that a recorder uses."""

    groups: AxisGroups
    recording: Recording
    orders_by_stream: bool


class HasCollectives(Protocol):
    """A `ProcessGrid`."""

    @property
    def collectives(self) -> Recorded: ...


def span(recorder: Recorder | None, *title: str) -> AbstractContextManager[None]:
    """A range around local work: `ndtp::gemm C 2/4 mlp.up`.

    Args:
        title: what is done, such as "gemm" or "gelu"; what comes out; which of how many chunks, such as "2/4"; the
            product or block that it is a part of.
    """
    if recorder is None and not _profiler_enabled():
        return NOTHING
    return _range(recorder, "compute", " ".join(filter(None, title)))


def observed(begin: Begin, recorder: Recorder | None, label: Label) -> Begin:
    """`begin`, which starts a collective, with ranges around its three parts."""
    name = label.title

    def run(x: Tensor, out: Tensor | None) -> Started:
        # What packs the operand is local work; the flight begins where the collective has been handed over.
        with _range(recorder, "compute", name):
            work, finish, held, borrowed = begin(x, out)
        flight = work if recorder is None else recorder.follow(label, work)

        def finished() -> Any:
            with _range(recorder, "compute", f"finish {name}"):
                return finish()

        return _ObservedWork(flight, recorder, label), finished, held, borrowed

    return run


@contextmanager
def _range(recorder: Recorder | None, kind: str, name: str, label: Label | None = None) -> Iterator[None]:
    with record_function(PREFIX + name) if _profiler_enabled() else NOTHING:
        if recorder is None:
            yield
            return
        entry = _Entry(kind, name, label, recorder.mark())
        try:
            yield
        finally:
            entry.end = recorder.mark()
            recorder.entries.append(entry)


class _ObservedWork:
    """The work of a collective, whose wait is a range."""

    def __init__(self, work: Any, recorder: Recorder | None, label: Label) -> None:
        self.work, self.recorder, self.label = work, recorder, label

    def wait(self) -> None:
        with _range(self.recorder, "wait", f"wait {self.label.title}", self.label):
            if self.work is not None:
                self.work.wait()


class _Landing:
    """A work that is waited for in a thread of its own, so that its end is seen when it comes.

    gloo has no futures of messages, and may call back from a future while the interpreter shuts down.
    """

    def __init__(self, work: Any, flight: _Entry) -> None:
        self._work, self._flight = work, flight
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:  # raised again where the collective is waited for
            self._error = error
        self._flight.end = time.perf_counter()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


@dataclass(slots=True)
class _Entry:
    """A span whose times are marks: seconds on the host's clock, or CUDA events."""

    kind: str
    name: str
    label: Label | None
    start: Any
    end: Any = None


class Recorder:
    """Writes down what this rank does on a grid: every local product, wait and collective's flight.

        with Recorder(mesh) as recorder:
            block(x).sum().backward()
        recorder.spans()

    On CUDA times are those of the device, by events on the streams; on the CPU those of the host.

    Raises:
        RuntimeError: the grid has a recorder already.
    """

    def __init__(self, grid: HasCollectives) -> None:
        self.grid, self._recording = grid, grid.collectives.recording
        self.entries: list[_Entry] = []
        self._on_device = grid.collectives.groups.device_type == "cuda"
        self._streams: dict[Any, torch.cuda.Stream] = {}

    def __enter__(self) -> Recorder:
        if self._recording.recorder is not None:
            raise RuntimeError(f"Recorder: {self.grid} has a recorder already; leave that one first")
        if self._on_device:
            self._origin = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            self._origin.record()
            torch.cuda.synchronize()
        self._host_origin = time.perf_counter()
        self._recording.recorder = self
        return self

    def __exit__(self, *error: Any) -> None:
        self._recording.recorder = None

    def mark(self) -> object:
        """Now, on the current stream or on the host's clock."""
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def follow(self, label: Label, work: Any) -> Any:
        """Write down the flight of a collective that was issued just now, and when it ends; what to wait for."""
        flight = _Entry("collective", label.title, label, self.mark())
        self.entries.append(flight)
        if work is None:
            return None
        if self._on_device and self.grid.collectives.orders_by_stream:
            # A stream of its own for what one communicator runs in order, so that no later end waits for an earlier.
            key = label.collective, label.axes
            stream = self._streams.get(key) or self._streams.setdefault(key, torch.cuda.Stream())
            with torch.cuda.stream(stream):
                work.wait()
                flight.end = self.mark()
            return work
        return _Landing(work, flight)

    def spans(self) -> list[Span]:
        """All that was recorded, by start; seconds since the recorder was entered.

        Collectives that were dropped before they were complete are left out.
        """
        if self._on_device:
            torch.cuda.synchronize()
        spans = [
            Span(
                entry.kind,
                entry.name,
                entry.label.phase if entry.label else "",
                entry.label.axes if entry.label else (),
                self._seconds(entry.start),
                self._seconds(entry.end),
            )
            for entry in self.entries
            if entry.end is not None
        ]
        return sorted(spans, key=lambda each: (each.start, each.end))

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark - self._host_origin
        return float(self._origin.elapsed_time(mark)) / 1e3
