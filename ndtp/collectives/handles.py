"""A collective from its binding to its result: what is settled once (`Route`), and one that is under way (`Handle`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ndtp.algebra.steps import Step
from ndtp.collectives.flight import DONE, WAITED, Flight, FlightEntry, Note
from ndtp.collectives.labels import Label
from ndtp.collectives.meter import arrived
from ndtp.collectives.streams import mark, stream_of
from ndtp.collectives.sums import Sum
from ndtp.collectives.turns import TURN, hand_over
from ndtp.collectives.watch import Watch, failure

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.buffer_ring import BufferRing
    from ndtp.collectives.codecs import Codec
    from ndtp.collectives.direct_exchange import Past


class Underway(Protocol):
    """A collective that torch, or a mover of ndtp's own, has started."""

    def wait(self) -> object:
        """Return when the result is there, or have the current stream wait for it."""
        ...


Shape = tuple[int, ...]
# What to wait for, how to finish it, what to hold until then, and which buffers of the ring go back after it.
Started = tuple[Underway | None, Callable[[], Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]
Begin = Callable[[Tensor, Tensor | None], Started]
T = TypeVar("T")


class Channel(NamedTuple):
    """Whom a collective reaches.

    Attributes:
        group: the process group, whose members are in the order of the world.
        seats: the rank in the group of each rank along the axes of the step, see `AxisGroups.seats`; None: the same.
        past: what the group has seen, on gloo.
        purpose: what messages say that they are for, on gloo.
    """

    group: ProcessGroup
    seats: tuple[int, ...] | None = None
    past: Past | None = None
    purpose: int = 0

    @property
    def me(self) -> int:
        """Return the position of this rank along the axes."""
        return self.along(self.group.rank())

    def along(self, member: int) -> int:
        """Return the position along the axes of a rank of the group."""
        return member if self.seats is None else self.seats.index(member)

    def seated(self, parts: Sequence[T]) -> Sequence[T]:
        """Put what belongs to each rank along the axes, in their order, into the order of the group."""
        if self.seats is None:
            return parts
        return [parts[self.along(member)] for member in range(len(parts))]


class Route:
    """A collective that is bound: whom it reaches, which shapes and which names it has is settled.

    Attributes:
        op, phase, part: what errors and profiles call it, see `Collectives.routes`.
        kind, axes: of the step.
        begin: starts it; knows nothing of the route, which holds it.
        shape: of its result.
        received: elements.
        codec: by which its tensors travel; None: as they are.
        coded_bytes: that it receives then, scales included.
        rounded: what arrives of a tensor that is sent to be summed up, or of a sum; None where it goes as it is.
        keeps_code: whether a gather gives what it received as `ndtp.compute.quantised.Quantised`.
        follows: it ends what another one began, and is no call of its own.
        note: for the record; None until it is launched.
    """

    __slots__ = (
        "axes", "begin", "channel", "codec", "coded_bytes", "follows", "keeps_code", "kind", "note", "op", "part",
        "phase", "received", "rounded", "shape",
    )  # fmt: skip

    begin: Begin
    shape: Shape
    received: int

    def __init__(self, step: Step, op: tuple[str, ...], phase: str, part: str, channel: Channel) -> None:
        self.kind, self.axes = step.kind, step.axes
        self.op, self.phase, self.part = op, phase, part
        self.channel, self.follows = channel, False
        self.codec: Codec | None = None
        self.coded_bytes, self.keeps_code = 0, False
        self.rounded: Callable[[Tensor], Tensor] | None = None
        self.note: Note | None = None

    def num_bytes(self, tensor: Tensor) -> int:
        """Return the bytes that this rank receives in exchange for a tensor that it sends."""
        return self.received * tensor.element_size() if self.codec is None else self.coded_bytes

    def label(self) -> Label:
        """One object a collective, see `Label`."""
        return Label(self.op, self.phase, self.kind, self.axes, self.part, follows=self.follows)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the world that take part; they are known once the collective was launched."""
        return () if self.note is None else self.note.ranks

    def enter(self, owner: Owner, tensor: Tensor) -> FlightEntry | None:
        """An entry in the record of the last collectives; None where there is none."""
        if owner.flight is None:
            return None
        if self.note is None:
            ranks = owner.groups.members(self.axes)
            what = self.op, self.phase, self.kind, self.axes, self.part, ranks, self.received
            self.note = Note(*what, waits=not owner.orders_by_stream)
        return owner.flight.start(self.note, self.num_bytes(tensor))


class Owner(Protocol):
    """The part of `Collectives` that its handles use."""

    groups: AxisGroups
    ring: BufferRing
    flight: Flight | None
    in_flight: int
    orders_by_stream: bool
    marks_streams: bool

    def describe(self, axes: Sequence[str]) -> str: ...

    def launch(self, route: Route, tensor: Tensor, out: Tensor | None = None) -> Handle: ...


class Handle:
    """A started collective.  `wait` gives its result, once; the buffers live until then.

    A handle that is dropped (an exception, a gradient nobody asked for) makes the stream on which it was started wait
    before its buffers go, whichever thread collects it; on gloo the next collective of its group waits for it.  Buffers
    of what was not seen to end are not lent again.
    """

    __slots__ = ("_borrowed", "_entry", "_finish", "_held", "_label", "_mark", "_owner", "_route", "_work")

    def __init__(
        self, owner: Owner, route: Route, started: Started, entry: FlightEntry | None, label: Label | None = None
    ) -> None:
        self._owner, self._route, self._entry, self._label = owner, route, entry, label
        self._work, self._finish, self._held, self._borrowed = started
        self._mark = mark() if owner.marks_streams else None
        owner.in_flight += 1

    def wait(self, then: Callable[[Tensor], Any] | None = None) -> Any:
        """Wait on the consumer's stream (NCCL) or in the host (gloo), and return the result.

        Args:
            then: what to make of the result, as blocks of a sum, [ranks, ..], or summed up, [1, ..]; returned instead.

        Raises:
            CommunicationError: a peer died or stalled.
            ValueError: it was waited for already.
        """
        finish, work = self._finish, self._work
        if finish is None:
            raise ValueError(f"{self._route.label()} was waited for already; its result is given once")
        if TURN.get() is not None and work is not None:
            hand_over()
        if self._label is not None and self._label.ahead is not None:
            arrived(self._label)
        entry = self._entry
        try:
            if entry is not None:
                entry[WAITED] = time.monotonic()
            if work is not None:
                work.wait()
            if then is None:
                result = finish()
            else:  # before its buffers are lent again
                result = then(finish.blocks if isinstance(finish, Sum) else finish()[None])
            if self._borrowed:
                self._owner.ring.give_back(self._borrowed)
            if entry is not None:
                entry[DONE] = time.monotonic()
            return result
        except RuntimeError as error:
            raise failure(self._route.label(), self._owner.describe, error, self._route.ranks) from error
        finally:
            self._close()

    def arriving(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the ranks whose rows have come, and these rows, as they come, of a gather along dim 0 that needs no
        finishing.

        Each is waited for on the consumer's stream, or in the host; `wait` comes after it as ever.  Where a collective
        does not tell its parts apart they come all at once.
        """
        ranks, work = self._route.channel.group.size(), self._work
        each = getattr(work, "parts", None)
        hand_over()
        if self._entry is not None:
            self._entry[WAITED] = time.monotonic()
        try:
            if each is None and work is not None:
                work.wait()
            result = self._finish()
            rows = result.shape[0] // ranks
            for part in range(ranks) if each is None else map(self._route.channel.along, each()):
                yield part, result[part * rows : (part + 1) * rows]
        except RuntimeError as error:
            raise failure(self._route.label(), self._owner.describe, error, self._route.ranks) from error

    def _close(self) -> None:
        if self._borrowed:
            self._owner.ring.forget(self._borrowed)
        self._work = self._finish = None  # type: ignore[assignment]
        self._held = self._borrowed = ()
        self._owner.in_flight -= 1

    def __del__(self) -> None:
        if self._finish is not None:
            if self._work is None:  # a dry run
                pass
            elif self._mark is not None:
                with torch.cuda.stream(stream_of(self._mark)):
                    self._work.wait()
            elif self._owner.orders_by_stream:
                self._work.wait()
            else:  # waiting here could last: a rank that fails must go, for its peers to see it
                # What is kept for the group must not hold the grid, which may hold the group.
                label = self._route.label()
                where = self._owner.describe(label.axes)
                watch = Watch(lambda axes: where, label, self._route.ranks, records=False)
                past = self._route.channel.past
                assert past is not None
                past.given_up.append((watch, self._work, (self._held, self._borrowed)))
            self._close()


class Relay(NamedTuple):
    """A collective in two: the second starts where the first is waited for."""

    owner: Owner
    first: Handle
    second: Route
    out: Tensor | None

    def wait(self) -> Tensor:
        return self.owner.launch(self.second, self.first.wait(), self.out).wait()
