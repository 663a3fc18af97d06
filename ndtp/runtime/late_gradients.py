"""Gradients of weights on their way: what backward started to reduce, and waits for late.

The ranks of a grid must start collectives in one order.  The order in which autograd runs its nodes does not give one:
where sequence numbers tie, or a gradient arrives, it depends on whatever else is in the graph of a rank.  So the
collectives of a gradient start at points that depend on the order of products alone: the first behind its own product,
the next one a product later, and what is left at the end of backward, always oldest first.  A gradient that arrives
earlier than that takes all older ones along, and those of its own chain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Variable

from ndtp.collectives.turns import TURN, staying
from ndtp.runtime.arrival_numbers import ArrivalNumbers
from ndtp.runtime.partial_sums import PartialSums, rounded_dtype
from ndtp.schedule.tasks import WINDOW

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ndtp.runtime.joint_leaves import JointLeaves
    from ndtp.runtime.moves import Move

    Holder = Tensor | JointLeaves | None


class LateGradient:
    """The gradient of one use of a weight in one backward.

    Attributes:
        number: in the order in which backward came to them.
        move: the way of the gradient from a sum of this rank to how it is stored.
        holder: the parameter to whose `.grad` it is to be added, or those of which the weight was made, if its move was
            told to stop before an all-reduce.
        sums: where it is kept then, or takes up what was kept of earlier ones.
    """

    __slots__ = ("_is_handed_in", "_is_kept", "_queue", "holder", "move", "number", "sums")

    def __init__(self, queue: LateGradients, number: int, move: Move, holder: Holder, sums: PartialSums) -> None:
        self._queue, self.number, self.move, self.holder, self.sums = queue, number, move, holder, sums
        self._is_kept, self._is_handed_in = holder is not None and sums.is_accumulating, False
        if holder is not None and self._is_kept and TURN.get() is not None:
            sums.expect(holder, self)

    def start_next(self) -> None:
        """Start the next collective, when the one under way has had the time of a product."""
        if self._is_handed_in:
            return
        self.move.start_next()
        self._take_up()

    def finish(self) -> None:
        """Wait for all collectives, or for those before an all-reduce that is left out."""
        if self._is_handed_in:
            return
        self.move.wait()
        if self._take_up():
            self.move.wait()

    def _take_up(self) -> bool:
        """Go on with the all-reduce, of all that was kept of earlier gradients too."""
        if not self.move.is_held or self._is_kept:
            return False
        if self.holder is not None and (earlier := self.sums.take(self.holder)) is not None:
            self.move.add(earlier, rounded_dtype(self.holder))
        self.move.release_hold().start()
        return True

    def hand_in(self) -> Tensor:
        """The gradient of a part that runs in turns with another one, which reduces both, before it arrives."""
        self._is_handed_in = True
        return self.move.take()

    def arrive(self) -> Tensor | None:
        """The finished gradient; None if it is kept in the partial sums."""
        self._queue.finish_through(self)
        if self._is_handed_in:
            return None
        gradient = self.move.take()
        if self.holder is None or not self.move.is_held:
            return gradient
        self.sums.hold(self.holder, self.number, gradient, self.move)
        return None


@dataclass
class Backward:
    """The work that a backward has left on its way.

    Attributes:
        chains: gradients, oldest first.
        task: the backward, if one is going on, by the number that autograd gives it.
        deferred: parts of gradients, to be multiplied later.
        defers: whether the chain that it is in has left them.
        owner: the gradients of the chain that has, once it is through.
        taken_up: what it ends of what was left in partial sums.
        numbers: the sequence numbers in autograd under which gradients arrive: a gradient is waited for when backward
            has gone past the oldest product of a window.  Two products hide a reduction, and bound the gradients that
            are held unreduced.
    """

    chains: deque[list[LateGradient]] = field(default_factory=deque)
    task: int | None = None
    deferred: deque[Callable[[], None]] = field(default_factory=deque)
    defers: bool = False
    owner: list[LateGradient] | None = None
    taken_up: list[PartialSums] = field(default_factory=list)
    numbers: ArrivalNumbers = field(default_factory=ArrivalNumbers)

    @property
    def is_going_on(self) -> bool:
        return self.task is not None


_BROKEN_OFF = -2  # no number of autograd's


class LateGradients:
    """All of them, oldest first: of all grids of a process, which may share process groups."""

    def __init__(self) -> None:
        self._count = 0
        self.backward = Backward()  # parts that run in turns have one each

    def expect(self, move: Move, holder: Holder, sums: PartialSums) -> LateGradient:
        self._count += 1
        return LateGradient(self, self._count, move, holder, sums)

    def enter(self) -> None:
        """End, at the beginning of every operation, the work that a broken or interrupted backward has left."""
        if self.backward.task is not None and torch._C._current_graph_task_id() != self.backward.task:  # type: ignore[attr-defined]
            self.finish()

    def came_through(self, gradients: Sequence[LateGradient], takes_up: PartialSums | None) -> None:
        """Backward is through a chain of products, which started to reduce these gradients.

        Args:
            takes_up: what was left in partial sums, if it adds to the `.grad` of parameters.
        """
        if gradients:
            if len(self.backward.chains) == WINDOW:
                self._finish_chain()
            self.backward.chains.append(list(gradients))
            if self.backward.defers:
                self.backward.defers, self.backward.owner = False, self.backward.chains[-1]
        if gradients or takes_up is not None:
            self.end_with_backward(takes_up)

    def end_with_backward(self, takes_up: PartialSums | None) -> None:
        """Have autograd end what is still on its way when its backward does, and what was left in partial sums."""
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        if self.backward.task != task:
            self.backward.task, self.backward.taken_up = task, []
            Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
        if takes_up is not None and takes_up not in self.backward.taken_up:
            self.backward.taken_up.append(takes_up)

    def defer(self, rest: Callable[[], None]) -> None:
        """Leave a part of a gradient that is expected to `catch_up`: at most until the next chain has a first product.

        Until then it holds its operands: those of one product of one chain.
        """
        self.backward.deferred.append(rest)
        self.backward.defers = True
        self.end_with_backward(None)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Multiply what was deferred, and start to reduce it."""
        self.backward.defers, self.backward.owner = False, None
        deferred = self.backward.deferred
        while deferred:
            deferred.popleft()()

    def start_next(self) -> None:
        """Start the next collective of every gradient, oldest first."""
        self.catch_up()
        with staying():
            for chain in self.backward.chains:
                for late in chain:
                    late.start_next()

    def finish_through(self, last: LateGradient) -> None:
        """Finish the gradients of a chain, and all older ones; nothing where another arrival did so before.

        All of a chain, since which of its gradients arrives first is another matter on each rank.
        """
        while self.backward.chains and self.backward.chains[0][0].number <= last.number:
            self._finish_chain()

    def _finish_chain(self) -> None:
        """The oldest one: each of its gradients goes on while others are waited for."""
        chain = self.backward.chains.popleft()
        if chain is self.backward.owner:
            self.catch_up()
        with staying():
            for late in chain:
                late.start_next()
            for late in chain:
                late.finish()

    def finish(self) -> None:
        self.backward.task = None
        self.start_next()
        while self.backward.chains:
            self._finish_chain()

    def break_off(self) -> bool:
        """End a backward after an exception; return whether the exception broke off a backward."""
        is_broken = self.backward.is_going_on
        if is_broken:
            self.finish()
        return is_broken

    def leave(self, backwards: Sequence[Backward]) -> None:
        """Leave the work of broken parts to the next operation, which ends it as one."""
        for each in backwards:
            self.backward.chains += each.chains
            self.backward.deferred += each.deferred
        self.backward.task = _BROKEN_OFF

    def _end(self) -> None:
        taken_up, self.backward.taken_up = self.backward.taken_up, []
        self.finish()
        for sums in taken_up:
            if not sums.is_accumulating:
                sums.finish()


_OF_WORLD: WeakKeyDictionary[ProcessGroup, LateGradients] = WeakKeyDictionary()


def late_gradients_of(world: ProcessGroup | None) -> LateGradients:
    """Return the late gradients of all grids on the ranks of `world`, which share its groups; None stands for one
    rank alone.
    """
    if world is None:
        return LateGradients()
    found = _OF_WORLD.get(world)
    if found is None:
        found = _OF_WORLD[world] = LateGradients()
    return found
