"""A training step on two clocks, one that computes and one a link: the tasks of `ndtp.schedule`, timed.  Pure.

What the executor does in order is replayed here in order, for many grids at once: a start puts a collective behind
those already on its link, a wait holds the computation until it is done, the next weight is gathered ahead, and the
reduction of a weight's gradient is waited for two products later, or at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ndtp.schedule import Wanted, backward_tasks, forward_tasks

WINDOW = 2  # products that hide the reduction of a weight's gradient: `ProcessGrid.recent_products`

# (collective, axis, bytes received per rank), one after another.
Messages = list[tuple[str, str, Any]]


class Links(Protocol):
    """What `ndtp.time_model.Network` tells of collectives."""

    def seconds(self, collective: str, axis: str, received: Any) -> Any: ...

    def crosses(self, axis: str) -> Any: ...


@dataclass(frozen=True)
class Product:
    """One product of a step.

    Attributes:
        messages: (phase, tensor) -> what moves it.
        gemm: seconds of the whole local product; forward, dgrad and wgrad take the same.
        chunk: seconds of one of its chunks of rows.
        after: seconds of element by element work that follow it in forward; three times that precede it in backward.
    """

    messages: dict[tuple[str, str], Messages]
    gemm: Any
    chunk: Any
    after: Any


@dataclass
class Timeline:
    """The clocks: `now` of the rank, and when each link becomes free."""

    links: Links
    now: Any = 0.0
    inside: Any = 0.0
    across: Any = 0.0
    pending: dict[Any, tuple[Any, Messages]] = field(default_factory=dict)

    def start(self, key: Any, messages: Messages, cut: int = 1) -> None:
        """Put the first collective of a move on its link; the others follow when it is waited for.

        Where a grid needs no first one, its second is the first.
        """
        if key in self.pending:
            return
        end, idle, later = self.now, True, []
        for collective, axis, received in messages:
            sent = self._send(collective, axis, np.where(idle, received, 0) / cut)
            end = np.maximum(end, sent)
            later.append((collective, axis, np.where(idle, 0, received) / cut))
            idle = idle & (np.asarray(received) == 0)
        self.pending[key] = end, later[1:]

    def wait(self, key: Any) -> None:
        end, rest = self.pending.pop(key)
        self.now = np.maximum(self.now, end)
        for message in rest:
            self.now = np.maximum(self.now, self._send(*message))

    def _send(self, collective: str, axis: str, received: Any) -> Any:
        seconds = self.links.seconds(collective, axis, received)
        crosses = self.links.crosses(axis)
        end = np.maximum(self.now, np.where(crosses, self.across, self.inside)) + seconds
        moves = seconds > 0
        self.across = np.where(moves & crosses, end, self.across)
        self.inside = np.where(moves & ~crosses, end, self.inside)
        return np.where(moves, end, self.now)


def step_seconds(products: Sequence[Product], links: Links, chunks: int = 1, regather: bool = False) -> Any:
    """Forward through all products and backward again.

    Args:
        regather: whether some grid gathers operands again in backward; what need not move has no bytes.
    """
    line = Timeline(links)
    for i, product in enumerate(products):
        for task in forward_tasks(chunks):
            cut = 1 if task.chunk is None else chunks
            if task.action == "start":
                line.start((i, task.tensor, task.chunk), product.messages["forward", task.tensor], cut)
            elif task.action == "wait":
                line.wait((i, task.tensor, task.chunk))
            elif task.action == "multiply":
                line.now = line.now + product.chunk
            elif task.action == "prefetch" and i + 1 < len(products):
                line.start((i + 1, "B", None), products[i + 1].messages["forward", "B"])
        line.now = line.now + product.after
    again = ("a", "b") if regather else ()
    phases = {"dC": "dgrad", "dA": "dgrad", "B": "dgrad", "A": "wgrad", "dB": "wgrad"}
    for i, product in reversed(list(enumerate(products))):
        line.now = line.now + 3 * product.after
        for task in backward_tasks(chunks, (Wanted(regather=again),)):
            cut = 1 if task.chunk is None else chunks
            if task.action == "start":
                line.start((i, task.tensor, task.chunk), product.messages[phases[task.tensor], task.tensor], cut)
            elif task.action == "wait":
                line.wait((i, task.tensor, task.chunk))
            elif task.action == "multiply":
                line.now = line.now + (product.gemm if task.tensor == "dB" else product.chunk)
        if (i + WINDOW, "dB", None) in line.pending:
            line.wait((i + WINDOW, "dB", None))
    for key in list(line.pending):
        line.wait(key)
    return line.now
