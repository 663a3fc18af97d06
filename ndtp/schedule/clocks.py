"""A training step on clocks, of the device, its links and its host: the tasks of `ndtp.schedule.tasks`, timed.  Pure.

What a program does in order is replayed here in order, for many grids at once: a start puts a collective behind
those already on its link, a wait holds the computation until it is done, the next weight is gathered ahead, a part of
a weight's gradient is left to the chain that follows, and its reduction is waited for two chains later, or at the end.
Where a host issues the tasks, each begins when it was issued at the earliest.

Of one grid the clocks can be kept, span by span: what `ndtp show schedule` draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ndtp.algebra.steps import phase_of
from ndtp.schedule.host import HostLane
from ndtp.schedule.links import SharedLink
from ndtp.schedule.tasks import WINDOW, Action, Task, Wanted, backward_tasks, first_deferred, forward_tasks, pieces

# (collective, axis, bytes received per rank), one after another.
Messages = list[tuple[str, str, Any]]

# Phase, product, tensor, chunk.
PieceKey = tuple[str, int, str, int | None]


class Links(Protocol):
    """The times of collectives, in seconds; `ndtp.planner.time_model.Network` is one implementation.

    Of `received` bytes: how long they take, how long they keep the next ones from the link, and how long a rank itself
    works at their sum when they have arrived; and how long it works to start them.
    """

    def seconds(self, collective: str, axis: str, received: object) -> Any: ...

    def occupied(self, collective: str, axis: str, received: object) -> Any: ...

    def summed(self, collective: str, axis: str, received: object) -> Any: ...

    def overhead(self, collective: str, axis: str) -> Any: ...

    def crosses(self, axis: str) -> Any: ...

    @property
    def shares(self) -> bool: ...  # see `SharedLink`; else one after the other, of many grids at once


@dataclass(frozen=True)
class TimedProduct:
    """One product of a step.

    Attributes:
        messages: (phase, tensor) -> what moves it; none of what does not move.
        gemm: seconds of the whole local product; forward, dgrad and wgrad take the same.
        chunk: seconds of one of its chunks of rows.
        after: seconds of element by element work that follow it in forward; three times that precede it in backward.
        own: the part of A, and of dC, that a rank multiplies while the others' are on their way; 0 where none is.
        own_weight: the same of B in forward.
        chained: whether the next product takes its result, in one schedule.
        copy: seconds in which a gathered B is put in order.
        coding: of the tensors that travel in fewer bytes, seconds to bring them to their form on the wire, and back.
    """

    messages: dict[tuple[str, str], Messages]
    gemm: Any
    chunk: Any
    after: Any
    copy: Any = 0.0
    own: tuple[Any, Any] = (0.0, 0.0)
    own_weight: Any = 0.0
    chained: bool = False
    coding: Mapping[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether the weight's gradient is one piece (`ndtp.schedule.tasks.pieces`), in each of many grids."""
        moves = [move for (_, tensor), moves in self.messages.items() if tensor == "dB" for move in moves]
        return any(kind == "all_reduce" and bool(np.all(np.asarray(received) > 0)) for kind, _, received in moves)

    def received(self, tensor: str) -> Any:
        """Bytes that move it in forward, on each of many grids."""
        return sum((np.asarray(received) for *_, received in self.messages.get(("forward", tensor), [])), np.zeros(()))


@dataclass(frozen=True)
class LaneSpan:
    """The work of one lane ("compute", or the axis whose link it is) from `begin` to `end`, in seconds."""

    lane: str
    begin: float
    end: float
    phase: str
    product: int
    tensor: str
    chunk: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.what} {self.tensor}{self.product}" + ("" if self.chunk is None else f"[{self.chunk}]")


@dataclass
class _Move:
    """A collective under way: begin, end, its lane, the rank's work after arrival, and the collective that follows."""

    begin: Any
    end: Any
    sums: Any = 0.0
    lane: tuple[str, str] = ("", "")
    rest: Messages = field(default_factory=list)


@dataclass
class Timeline:
    """The clocks: `now` of the rank, and when each link becomes free.

    Attributes:
        shared: the link inside of a node, and the one to others, if collectives share them.
        contention: as in `ndtp.planner.hardware.Hardware`.
        spans: of one grid, what happened when; None keeps nothing.
        forward: when forward was over.
        host: what issues the tasks; None: a graph, or the processor that computes.
        issued: when the host has issued the last task.
    """

    links: Links
    contention: float = 0.0
    spans: list[LaneSpan] | None = None
    now: Any = 0.0
    forward: Any = 0.0
    inside: Any = 0.0
    across: Any = 0.0
    shared: tuple[SharedLink, SharedLink] = field(default_factory=lambda: (SharedLink(), SharedLink()))
    host: HostLane | None = None
    issued: Any = 0.0
    pending: dict[PieceKey, _Move] = field(default_factory=dict)

    def issue(self, key: PieceKey, task: str, there: Any = True) -> None:
        """Let the host issue a task, on those of the grids where there is one."""
        if self.host is not None:
            begin, self.issued = self.issued, self.issued + np.where(there, getattr(self.host, task), 0.0)
            self._keep("host", key, "issue", begin, self.issued)

    def compute(self, key: PieceKey, what: str, seconds: Any) -> None:
        """Work of the rank; beside collectives it goes on at `1 - contention` of its speed."""
        self.issue(key, "multiply" if what in ("multiply", "own") else "activate", np.asarray(seconds) > 0)
        begin, slowed = self.now if self.host is None else np.maximum(self.now, self.issued), seconds
        if self.contention:
            beside: Any = 0.0
            for move in self.pending.values():
                beside = beside + np.maximum(0.0, move.end - np.maximum(begin, move.begin))
            slowed = np.minimum(seconds / max(1e-9, 1 - self.contention), seconds + self.contention * beside)
        self.now = begin + slowed
        self._keep("compute", key, what, begin, begin + seconds)
        self._keep("compute", key, "contention", begin + seconds, self.now)

    def start(self, key: PieceKey, messages: Messages, cut: int = 1) -> None:
        """Put the first collective of a move on its link; the next starts by `start_next`, or when it is waited for.

        Where a grid needs no first one, its second is the first.
        """
        if key in self.pending:
            return
        if key[2] == "dB" and key[3] in (None, 0):
            self.issue(key, "gradient", sum(np.asarray(received) for *_, received in messages) > 0)
        move, idle = _Move(self.now, self.now), True
        for collective, axis, received in messages:
            self._send(key, move, (collective, axis, np.where(idle, received, 0) / cut))
            move.rest.append((collective, axis, np.where(idle, 0, received) / cut))
            idle = idle & (np.asarray(received) == 0)
        del move.rest[:1]
        self.pending[key] = move

    def wait(self, key: PieceKey) -> None:
        """Hold the computation until a move is done."""
        move = self.pending.pop(key)
        self.issue(key, "wait", np.asarray(move.end) > move.begin)
        self._arrive(key, move)
        for message in move.rest:
            self._send(key, move, message)
            self._arrive(key, move)

    def start_next(self, key: PieceKey) -> None:
        """Put the second collective of a move on its link, when its first is done."""
        move = self.pending[key]
        if move.rest:
            message = move.rest.pop(0)
            self._arrive(key, move, np.asarray(message[2]) > 0)
            self._send(key, move, message)

    def _arrive(self, key: PieceKey, move: _Move, there: Any = True) -> None:
        """Add the rank's work of summing up what has arrived, for collectives that leave the sum to the rank."""
        begin, self.now = np.maximum(self.now, move.end), np.where(there, np.maximum(self.now, move.end), self.now)
        self.now = self.now + np.where(there, move.sums, 0.0)
        move.sums = np.where(there, 0.0, move.sums)
        moved, move.begin = move.begin, np.where(there, move.end, move.begin)
        self._keep(move.lane[0], key, move.lane[1], moved, move.begin)
        self._keep("compute", key, "sum", begin, self.now)

    def _send(self, key: PieceKey, move: _Move, message: tuple[str, str, Any]) -> None:
        """Put a collective behind those on its link."""
        collective, axis, received = message
        seconds, occupied = (f(collective, axis, received) for f in (self.links.seconds, self.links.occupied))
        moves, crosses = seconds > 0, self.links.crosses(axis)
        self.issue(key, "start", moves)
        ready = self.now if self.host is None else np.maximum(self.now, self.issued)
        if not self.links.shares:
            begin = np.maximum(ready, np.where(crosses, self.across, self.inside))
            self.across = np.where(moves & crosses, begin + occupied, self.across)
            self.inside = np.where(moves & ~crosses, begin + occupied, self.inside)
            move.begin = np.where(moves, np.maximum(move.begin, begin), move.begin)
            move.end = np.where(moves, np.maximum(move.end, begin + seconds), move.end)
        elif moves:
            self.shared[bool(crosses)].send(move, float(ready), axis, float(seconds), float(occupied))
        if np.any(moves):
            move.lane = axis, collective
        started, self.now = self.now, self.now + np.where(moves, self.links.overhead(collective, axis), 0.0)
        self._keep("compute", key, "start", started, self.now)
        move.sums = move.sums + self.links.summed(collective, axis, received)

    def _keep(self, lane: str, key: PieceKey, what: str, begin: Any, end: Any) -> None:
        if self.spans is not None and end > begin:
            phase, product, tensor, chunk = key
            self.spans.append(LaneSpan(lane, float(begin), float(end), phase, product, tensor, chunk, what))


def step_seconds(
    products: Sequence[TimedProduct],
    links: Links,
    chunks: int = 1,
    regather: bool = False,
    contention: float = 0.0,
    spans: list[LaneSpan] | None = None,
    host: HostLane | None = None,
) -> Any:
    """Forward through all products and backward again; see `replayed`.  Grids of other orders of tasks go by turns.

    With a host it is one of many steps: where the device is the slower one, the host is ahead of it.  Spans are the
    first step's.
    """
    seconds: Any = 0.0
    for rows_first, there in _orders(products, chunks):
        how = products, links, chunks, regather, contention
        line = replayed(*how, spans, rows_first, host)
        now = line.now
        if host is not None:
            worked = line.issued
            line = replayed(*how, None, rows_first, host, ahead=np.maximum(0.0, line.now - worked))
            now = np.maximum(line.now, worked)
        seconds = np.where(there, now, seconds)
    return seconds


def _orders(products: Sequence[TimedProduct], chunks: int) -> Iterator[tuple[tuple[bool, ...], Any]]:
    """Return `ndtp.schedule.arrivals.rows_first` of these products, and the grids, among many, on which it holds."""
    flags, rows, result = [], np.zeros(()), np.zeros(())
    for product in products:
        flags.append((product.received("A") + result == 0) & (product.received("B") > rows))
        rows, result = (product.chained * product.received(tensor) for tensor in ("A", "C"))
    if chunks == 1 and not any(np.any(product.own_weight) for product in products):
        flags = [np.False_ for _ in flags]  # it comes to the same
    table = np.stack(np.broadcast_arrays(*flags))
    for order in np.unique(table.reshape(len(flags), -1), axis=1).T:
        yield tuple(order.tolist()), (table == order.reshape(-1, *[1] * (table.ndim - 1))).all(0)


def replayed(
    products: Sequence[TimedProduct],
    links: Links,
    chunks: int = 1,
    regather: bool = False,
    contention: float = 0.0,
    spans: list[LaneSpan] | None = None,
    rows_first: tuple[bool, ...] | None = None,
    host: HostLane | None = None,
    ahead: Any = 0.0,
) -> Timeline:
    """The clocks at the end of a forward through all products and backward again.

    Args:
        regather: whether some grid gathers operands again in backward; what need not move has no bytes.
        spans: filled with what happens when, for a single grid.
        rows_first: of every product, see `ndtp.schedule.arrivals.rows_first`; default: what it is on a single grid.
        host: what issues the tasks; None: they are in a graph.
        ahead: of the device, the host as the step begins, in seconds.
    """
    if rows_first is None:
        ((rows_first, _),) = _orders(products, chunks)
    line = Timeline(links, contention, spans, host=host, issued=-ahead)
    begun = {}
    for phase, i, task in _tasks(products, chunks, regather, rows_first):
        product, cut = products[i], 1 if task.chunk is None else chunks
        key = (phase, i, task.tensor, task.chunk)
        if _begins_chain(products, phase, i, task):
            line.issue(key, "chain")
        if phase == "forward":
            line.forward = line.now
        if task.action is Action.START:
            move = phase_of(task.tensor, phase == "backward"), task.tensor
            line.compute(key, "encode", product.coding.get(move, (0.0, 0.0))[0] / cut)
            line.start(key, product.messages.get(move, []), cut)
        elif task.action is Action.WAIT:
            line.wait(key)
            move = phase_of(task.tensor, phase == "backward"), task.tensor
            line.compute(key, "decode", product.coding.get(move, (0.0, 0.0))[1] / cut)
            if task.tensor == "B":
                line.compute(key, "order", product.copy)
        elif task.action is Action.START_NEXT:
            line.start_next(key)
        elif task.action is Action.OWN:
            waits = (phase, i, "B", None) in line.pending
            begun[key] = product.own_weight if waits else product.own[phase == "backward"]
            line.compute(key, "own", begun[key] * product.chunk)
        elif task.action is Action.MULTIPLY:
            whole = product.gemm if task.tensor == "dB" and task.chunk is None else product.chunk
            line.compute(key, "multiply", (1 - begun.pop(key, 0.0)) * whole)
        elif task.action is Action.ACTIVATE:
            source = products[i - 1] if task.tensor == "A" else product
            line.compute(key, "activate", (3 if task.tensor == "dC" else 1) * source.after / cut)
        elif task.action is Action.PREFETCH and phase == "forward" and i + 1 < len(products):
            line.start((phase, i + 1, "B", None), products[i + 1].messages[phase, "B"])
    for key in list(line.pending):
        line.wait(key)
    return line


def _begins_chain(products: Sequence[TimedProduct], phase: str, i: int, task: Task) -> bool:
    """Return whether a task is the first of a pass of a chain."""
    if phase == "forward":
        return task.action is Action.START and task.tensor == "B" and (i == 0 or not products[i - 1].chained)
    return (
        task.action is Action.ACTIVATE and task.tensor == "dC" and (i + 1 == len(products) or not products[i].chained)
    )


def _tasks(
    products: Sequence[TimedProduct], chunks: int, regather: bool, rows_first: Sequence[bool]
) -> Iterator[tuple[str, int, Task]]:
    """(phase, product, task) of a step, as programs go through them, chain by chain."""
    # The last one ends a chain whatever it was cut out of: the first product of a block can be looked at alone.
    ends = [i for i, product in enumerate(products) if not product.chained or i + 1 == len(products)]
    chains = [range(begin, end + 1) for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    for chain in chains:
        for task in forward_tasks(chunks, (False,) * len(chain), tuple(rows_first[i] for i in chain)):
            yield "forward", chain[task.product], task
        yield "forward", chain[-1], Task(Action.ACTIVATE, "C")
    again = ("a", "b") if regather else ()
    wanted = [Wanted(regather=again, whole=product.whole) for product in products]
    for k, chain in reversed(list(enumerate(chains))):
        yield "backward", chain[-1], Task(Action.ACTIVATE, "dC")
        for task in backward_tasks(chunks, tuple(wanted[i] for i in chain)):
            if task.action is Action.ADVANCE:
                yield from _gradients(Action.START_NEXT, chains[k + 1 : k + 2], chunks, products)
            elif task.action is Action.CATCH_UP:
                yield from _deferred(chains[k + 1 : k + 2], chunks, products)
            elif task.action is not Action.DEFER:
                yield "backward", chain[task.product], task
        yield from _gradients(Action.WAIT, chains[k + WINDOW : k + WINDOW + 1], chunks, products)
    yield from _deferred(chains[:1], chunks, products)
    yield from _gradients(Action.START_NEXT, chains[WINDOW - 1 :: -1], chunks, products)


def _deferred(
    chains: Sequence[Sequence[int]], chunks: int, products: Sequence[TimedProduct]
) -> Iterator[tuple[str, int, Task]]:
    """Return the parts of weight gradients that these chains deferred."""
    for first, *_ in chains:
        for j in () if products[first].whole else range(first_deferred(chunks), chunks):
            yield from (("backward", first, Task(action, "dB", j)) for action in (Action.MULTIPLY, Action.START))


def _gradients(
    action: Action, chains: Sequence[Sequence[int]], chunks: int, products: Sequence[TimedProduct]
) -> Iterator[tuple[str, int, Task]]:
    """Return the deferred parts of every piece of the weight gradients of these chains."""
    for chain in chains:
        for i in reversed(chain):
            yield from (("backward", i, Task(action, "dB", j)) for j in pieces(chunks, products[i].whole))
