"""Streams and events that run nothing: what must come before what, by vector clocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ndtp.testing.cuda.place import CudaFault, machine

VectorClock = dict[int, int]  # lane -> the operations of that lane that come before
HOST = 0
_LANES = itertools.count(1)


def join(clock: VectorClock, other: VectorClock) -> None:
    """Let all that comes before `other` come before `clock`, too."""
    for lane, tick in other.items():
        if clock.get(lane, 0) < tick:
            clock[lane] = tick


@dataclass(eq=False)
class Lane:
    """An order of operations: a stream's, or that of a communicator.

    Attributes:
        clock: the operations that come before the next one.
        capture: the `Capture` that the lane is part of; None: it runs.
    """

    name: str
    number: int = field(default_factory=lambda: next(_LANES))
    clock: VectorClock = field(default_factory=dict)
    capture: Any = None

    def tick(self) -> int:
        """Add an operation, and return its number."""
        self.clock[self.number] = now = self.clock.get(self.number, 0) + 1
        return now

    def wait_lane(self, other: Lane) -> None:
        """Wait for all that was enqueued on another lane so far."""
        self.wait(other.clock, other.capture, f"work on {other.name}")

    def wait(self, clock: VectorClock, capture: Any, what: str) -> None:
        """Wait for what a clock says, which was read in a capture or outside of any.

        Raises:
            CudaFault: the wait crosses the edge of a capture.
        """
        if capture is not None and capture.is_ended:
            if capture is not self.capture and not capture.is_abandoned:
                raise CudaFault(f"{self.name} waits for {what}, which was captured in a graph that has ended")
        elif self.capture is not None and capture is not self.capture:
            raise CudaFault(
                f"{self.name}, which is captured, waits for {what} from outside of the capture "
                "(cudaErrorStreamCaptureIsolation)"
            )
        elif capture is not None and self.capture is None:
            capture.take_in(self)
        join(self.clock, clock)


class Snapshot:
    """A point on a lane: what an event records."""

    def __init__(self, lane: Lane) -> None:
        self.clock, self.capture, self.name = dict(lane.clock), lane.capture, lane.name


def is_before(accesses: Iterable[tuple[int, int]], *clocks: VectorClock) -> bool:
    """Return whether operations (lane, number) come before what the clocks say together."""
    return all(any(clock.get(lane, 0) >= tick for clock in clocks) for lane, tick in accesses)


class StreamStandIn:
    """`torch.cuda.Stream` without a device."""

    def __init__(self, device: Any = None, priority: int = 0, **known: Any) -> None:
        owner = machine()
        if "stream_id" in known:
            self.lane = owner.lanes[known["stream_id"]]
        else:
            self.lane = Lane(f"stream {len(owner.lanes)}")
            owner.lanes[self.lane.number] = self.lane
        self.priority, self._machine = priority, owner
        self.device = owner.device

    @property
    def stream_id(self) -> int:
        return self.lane.number

    cuda_stream = stream_id

    def wait_stream(self, other: StreamStandIn) -> None:
        """See torch."""
        self.lane.wait_lane(other.lane)

    def wait_event(self, event: EventStandIn) -> None:
        """See torch."""
        event.wait(self)

    def record_event(self, event: EventStandIn | None = None) -> EventStandIn:
        """See torch."""
        event = EventStandIn() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """See torch."""
        self._machine.synchronize([self.lane], f"synchronize of {self.lane.name}")

    def query(self) -> bool:
        """See torch; a stand-in's work is never done before something waited for it."""
        self._machine.refuse_in_capture(f"query of {self.lane.name}")
        return is_before(self.lane.clock.items(), self._machine.host)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamStandIn) and other.lane is self.lane

    def __hash__(self) -> int:
        return self.lane.number

    def __enter__(self) -> StreamStandIn:
        self._machine.enter_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.leave_stream()

    def __repr__(self) -> str:
        return f"<{self.lane.name}>"


class EventStandIn:
    """`torch.cuda.Event` without a device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._machine = machine()
        self._at: Snapshot | None = None

    def record(self, stream: StreamStandIn | None = None) -> None:
        """See torch."""
        self._at = Snapshot((stream or self._machine.current_stream()).lane)

    def wait(self, stream: StreamStandIn | None = None) -> None:
        """See torch: an event that was never recorded is waited for by nobody."""
        if self._at is not None:
            lane = (stream or self._machine.current_stream()).lane
            lane.wait(self._at.clock, self._at.capture, f"an event of {self._at.name}")

    def synchronize(self) -> None:
        """See torch."""
        self._machine.refuse_in_capture("synchronize of an event")
        if self._at is not None:
            join(self._machine.host, self._at.clock)

    def query(self) -> bool:
        """See torch; a stand-in's work is never done before something waited for it."""
        self._machine.refuse_in_capture("query of an event")
        return self._at is None or is_before(self._at.clock.items(), self._machine.host)

    def elapsed_time(self, other: EventStandIn) -> float:
        """Return 0: nothing takes time here."""
        return 0.0
