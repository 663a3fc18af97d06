"""Parts of a batch through a whole model in turns: one computes while the collectives of another are on their way.

Each part runs forward and backward in a thread of its own, and hands over where it would wait for a collective.  What
a step has learnt, and what backward has left on its way, is each part's own; gradients add up, and what `accumulate`
would hold back until the last micro-batch is held back until the last part.

Source: Wang et al. 2024, "Domino"; Wang et al. 2024, "DHelix".
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ndtp.collectives.turns import TURN, Turns
from ndtp.errors import GridError
from ndtp.runtime.late_gradients import Backward
from ndtp.runtime.thread_state import state_of_thread
from ndtp.runtime.weight_prefetch import WeightPrefetch

if TYPE_CHECKING:
    from ndtp.runtime.step_state import StepState


def interleave(
    state: StepState, device_type: str, step: Callable[..., object], parts: Sequence[tuple[object, ...]]
) -> list[object]:
    """See `ProcessGrid.interleave`.

    Args:
        state: what its grid has learnt.
        parts: the arguments of each call.
    """
    _check(state, len(parts))
    state.late.enter()
    switch = _Switch(state, device_type, len(parts))
    turns = Turns(len(parts), switch)
    results: list[object] = [None] * len(parts)

    def run(number: int) -> None:
        # On CUDA backward would run in a thread of autograd's own, which cannot be left.
        with torch.autograd.set_multithreading_enabled(False):
            results[number] = turns.run(number, lambda: tree_map_only(Tensor, _without_graph, step(*parts[number])))

    as_here = state_of_thread(device_type)

    def run_elsewhere(number: int) -> None:
        with as_here():
            run(number)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run_elsewhere, i), name=f"part {i}", daemon=True)
        for i in range(1, len(parts))
    ]
    state.partial_sums.in_turns = True
    try:
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
    finally:
        state.partial_sums.in_turns = False
        switch.back(turns.error)
    if turns.error is None:
        return results
    try:
        raise turns.error
    finally:
        turns.error = None  # which would hold on to itself, and to what was on its way


def _check(state: StepState, count: int) -> None:
    if TURN.get() is not None or state.partial_sums.in_turns:
        raise GridError("interleave: a part is not interleaved itself\n  fix: give the outer one more parts")
    if torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
        raise GridError("interleave: called in a backward\n  fix: call it with a step that runs forward and backward")
    if torch.compiler.is_compiling():
        raise GridError(
            "interleave: threads cannot be compiled\n  fix: compile the model, or the step that is interleaved"
        )
    if count == 0:
        raise GridError("interleave: there are no parts\n  fix: one sequence of parts for each argument of the step")


def _without_graph(x: Tensor) -> Tensor:
    return x.detach()


class _Standing(NamedTuple):
    """All of a step that is one part's own while several run.

    Attributes:
        depth: of the contexts in which gradients are accumulated.
        random: the states of torch's generators.
    """

    prefetch: WeightPrefetch
    prefetch_backward: WeightPrefetch
    depth: int
    backward: Backward
    random: list[Tensor]


class _Switch:
    """Exchanges what is one part's own, between two turns.

    Every part but the first draws its random numbers from a seed that is drawn here: the same on every grid, wherever
    parts hand over.  All but the last accumulate.
    """

    def __init__(self, step: StepState, device_type: str, count: int) -> None:
        self.step = step
        self._generators = [torch.default_generator]
        if device_type == "cuda":
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._before, self._now = self._standing(), 0
        seeds = [int(torch.randint(2**62, (), device="cpu")) for _ in range(1, count)]
        random = [[generator.get_state() for generator in self._generators]]
        random += [
            [torch.Generator(each.device).manual_seed(seed).get_state() for each in self._generators] for seed in seeds
        ]
        depth = step.partial_sums.depth
        self._parts = [
            _Standing(step.prefetch.for_part(), step.prefetch_backward.for_part(), depth + (i + 1 < count), Backward(),
                      random[i])
            for i in range(count)
        ]  # fmt: skip
        self._put(self._parts[0])

    def __call__(self, number: int) -> None:
        self._parts[self._now] = self._standing()
        self._put(self._parts[number])
        self._now = number

    def back(self, error: BaseException | None) -> None:
        """Switch the state back to what it was before, but keep what the first part has drawn.

        What parts that were broken off have left on its way is ended when the next operation begins, as ever.
        """
        self(0)
        before, late, sums = self._before, self.step.late, self.step.partial_sums
        self._put(before._replace(random=self._parts[0].random))
        left = [part.backward for part in self._parts]
        if any(backward.is_going_on for backward in left):
            late.leave(left)
        if error is not None:
            sums.discard()  # nobody can say what is in them
        elif not sums.is_accumulating:
            sums.finish()  # of weights to which the last part did not come

    def _standing(self) -> _Standing:
        step = self.step
        states = [generator.get_state() for generator in self._generators]
        return _Standing(
            step.prefetch, step.prefetch_backward, step.partial_sums.depth, step.late.backward, states
        )  # fmt: skip

    def _put(self, standing: _Standing) -> None:
        step = self.step
        step.prefetch, step.prefetch_backward = standing.prefetch, standing.prefetch_backward
        step.partial_sums.depth, step.late.backward = standing.depth, standing.backward
        for generator, state in zip(self._generators, standing.random, strict=True):
            generator.set_state(state)
