"""A collective from its binding to its result: what is settled once (`Route`), and one that is under way (`Handle`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from ndtp.algebra.steps import Step
from ndtp.collectives.labels import LABEL, Label
from ndtp.collectives.meter import arrived
from ndtp.collectives.turns import TURN, hand_over
from ndtp.errors import CommunicationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ndtp.collectives.buffer_ring import BufferRing
    from ndtp.collectives.direct_exchange import Past

Shape = tuple[int, ...]
# What to wait for, how to finish it, what to hold until then, and which buffers of the ring go back after it.
Started = tuple[Any, Callable[[], Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]
Begin = Callable[[Tensor, Tensor | None], Started]


class Watch:
    """Names the collectives that are started inside, and says of one that fails what it was for.

    Args:
        describe: `AxisGroups.describe`, or what it has said.
    """

    __slots__ = ("_token", "describe", "label")

    def __init__(self, describe: Callable[[Sequence[str]], str], label: Label) -> None:
        self.describe, self.label = describe, label

    def __enter__(self) -> None:
        self._token = LABEL.set(self.label)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        LABEL.reset(self._token)
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            raise failure(self.label, self.describe, error) from error


def failure(label: Label, describe: Callable[[Sequence[str]], str], error: RuntimeError) -> CommunicationError:
    """The error that says what a collective was for, and whom it waited for."""
    if isinstance(error, CommunicationError):
        return error
    return CommunicationError(
        f"{label.collective} of {' '.join(label.op)} ({label.phase}) over axis {' '.join(label.axes)} failed: "
        f"{describe(label.axes)}\n  cause: {error}"
    )


class Channel(NamedTuple):
    """Whom a collective reaches.  On gloo, what the group has seen, and what messages say that they are for."""

    group: ProcessGroup
    past: Past | None = None
    purpose: int = 0


class Route:
    """A collective that is bound: whom it reaches, which shapes and which names it has is settled.

    Attributes:
        op, phase, part: what errors and profiles call it, see `Collectives.routes`.
        kind, axes: of the step.
        begin: starts it; knows nothing of the route, which holds it.
        shape: of its result.
        received: elements.
        follows: it ends what another one began, and is no call of its own.
    """

    __slots__ = ("axes", "begin", "channel", "follows", "kind", "op", "part", "phase", "received", "shape")

    begin: Begin
    shape: Shape
    received: int

    def __init__(self, step: Step, op: tuple[str, ...], phase: str, part: str, channel: Channel) -> None:
        self.kind, self.axes = step.kind, step.axes
        self.op, self.phase, self.part = op, phase, part
        self.channel, self.follows = channel, False

    def label(self) -> Label:
        """One object a collective, see `Label`."""
        return Label(self.op, self.phase, self.kind, self.axes, self.part, follows=self.follows)


class Owner(Protocol):
    """What a handle asks of the `Collectives` that made it."""

    ring: BufferRing
    in_flight: int
    orders_by_stream: bool

    def describe(self, axes: Sequence[str]) -> str: ...

    def launch(self, route: Route, tensor: Tensor, out: Tensor | None = None) -> Handle: ...


class Handle:
    """A started collective.  `wait` gives its result, once; the buffers live until then.

    A handle that is dropped (an exception, a gradient nobody asked for) makes the stream wait before its buffers go;
    on gloo the next collective of its group waits for it.  Buffers of what was not seen to end are not lent again.
    """

    __slots__ = ("_borrowed", "_finish", "_held", "_label", "_owner", "_route", "_work")

    def __init__(self, owner: Owner, route: Route, started: Started, label: Label | None = None) -> None:
        self._owner, self._route, self._label = owner, route, label
        self._work, self._finish, self._held, self._borrowed = started
        owner.in_flight += 1

    def wait(self) -> Tensor:
        """Wait on the consumer's stream (NCCL) or in the host (gloo), and return the result.

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
        try:
            if work is not None:
                work.wait()
            result = finish()
            if self._borrowed:
                self._owner.ring.give_back(self._borrowed)
            return result
        except RuntimeError as error:
            raise failure(self._route.label(), self._owner.describe, error) from error
        finally:
            self._close()

    def arriving(self) -> Iterator[tuple[int, Tensor]]:
        """Of a gather along dim 0, whose result needs no finishing: which ranks' rows have come, as they come.

        Each is waited for on the consumer's stream, or in the host; `wait` comes after it as ever.  Where a collective
        does not tell its parts apart they come all at once.
        """
        ranks, work = self._route.channel.group.size(), self._work
        each = getattr(work, "parts", None)
        hand_over()
        try:
            if each is None and work is not None:
                work.wait()
            result = self._finish()
            rows = result.shape[0] // ranks
            for part in range(ranks) if each is None else each():
                yield part, result[part * rows : (part + 1) * rows]
        except RuntimeError as error:
            raise failure(self._route.label(), self._owner.describe, error) from error

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
            elif self._owner.orders_by_stream:
                self._work.wait()
            else:  # waiting here could last: a rank that fails must go, for its peers to see it
                # What is kept for the group must not hold the grid, which may hold the group.
                label = self._route.label()
                where = self._owner.describe(label.axes)
                watch = Watch(lambda axes: where, label)
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
