"""A chain of products that is bound: flat lists of functions over numbered slots, which is all that runs in a call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import _profiler_enabled

from ndtp.collectives.recorder import NOTHING, span
from ndtp.runtime.closures import DEFERS, FIRST, HELD, LEAVES, OWNER, STEP, WEIGHT, Run
from ndtp.runtime.moves import Move, Way
from ndtp.runtime.phase import Phase
from ndtp.runtime.recheck import PHASES
from ndtp.runtime.slots import Key, Setting
from ndtp.schedule.arrivals import rows_first
from ndtp.schedule.tasks import Wanted, backward_tasks, forward_tasks

if TYPE_CHECKING:
    from ndtp.collectives.handles import Shape
    from ndtp.runtime.recheck import Looking
    from ndtp.runtime.step_state import StepState

MOST_PROGRAMS = 1024
NO_LEAVES: dict[tuple[int, str], Tensor | None] = {}


class Program:
    """A chain on one rank of one grid, for tensors of given shapes and one dtype: forward, and backward of it.

    Args:
        shapes: of A, the weights, and the biases or None, as they are stored.
        needs: of which of them gradients are wanted.
        wanted: what every product does in backward.

    Attributes:
        kept: what forward keeps for backward, by product, tensor and chunk.
        ends: the products whose weights forward and backward need first, where these may have been gathered ahead.
        operands: those of A and the weights that backward multiplies by, by their places among the tensors.
        late: the weights and biases whose gradients take steps, by their places.
        feeds_back: whether gradients of weights have error feedback.
        may_defer: whether backward can leave a part of a weight's gradient to the chain that follows.
        late_if_deferred: the weight whose gradient takes no steps, and is late if it does.
    """

    def __init__(
        self, setting: Setting, shapes: Sequence[Shape | None], needs: Sequence[bool], wanted: Sequence[Wanted]
    ) -> None:
        count = len(setting.stages)
        self.setting, self.wanted = setting, tuple(wanted)
        self.is_wanted = any(needs)
        self.shapes, self.needs = tuple(shapes), tuple(needs)
        keys = [(0, "A"), *((p, "B") for p in range(count)), *((p, "bias") for p in range(count))]
        stored = {key: shape for key, shape in zip(keys, shapes, strict=True) if shape is not None}
        plans = self.plans = [stage.plan for stage in setting.stages]
        self.names = [plan.name for plan in plans]
        first = 0 if plans[0].gathers_b else None
        last = count - 1 if plans[-1].gathers_b and wanted[-1].again("b") else None
        self.ends = first, last
        self.operands = [0] * wanted[0].wgrad + [p + 1 for p in range(count) if wanted[p].dgrad]
        self.late = [1 + p for p in range(count) if wanted[p].wgrad and plans[p].relayouts["dB"]]
        self.late += [1 + count + p for p in range(count) if wanted[p].bias and plans[p].relayouts["dbias"]]
        self.may_defer, self.late_if_deferred = False, list[int]()
        wire = setting.collectives.wire
        self.feeds_back = wire is not None and wire.error_feedback
        self.kept, kept_shapes = self._bind_forward(stored, first)
        self._bind_backward(dict(zip(self.kept, kept_shapes, strict=True)), stored, last)

    def _bind_forward(self, stored: dict[tuple[int, str], Shape], first: int | None) -> Any:
        phase = Phase(self.setting, self.wanted, stored, is_forward=True)
        if first is not None:
            phase.take_weight(first)
        biases = tuple((p, "bias") in stored for p in range(phase.last + 1))
        first_rows = rows_first(self.plans, [stage.sizes for stage in self.setting.stages])
        phase.add(forward_tasks(phase.chunks, biases, first_rows))
        c = phase.result(phase.last, "C")
        phase.add_bias(phase.last, c)
        kept = phase.kept()
        phase.end_of_task("finish")
        self._inputs = [i for i, shape in enumerate(self.shapes) if shape is not None]
        self._c, self._kept = c, tuple(kept.values())
        self._forward = _Runner(phase, len(self.setting.stages))
        return tuple(kept), [phase.shapes[slot] for slot in kept.values()]

    def _bind_backward(self, kept: dict[Key, Shape], stored: dict[tuple[int, str], Shape], last: int | None) -> None:
        if not self.is_wanted:
            return
        again = {(p, name): shape for (p, name, _), shape in kept.items() if name.lower() in self.wanted[p].regather}
        stage, grad = self.setting.stages[-1], (len(self.setting.stages) - 1, "dC")
        # In the order of `kept`, behind the gradient.
        phase = Phase(self.setting, self.wanted, {grad: stage.plan.start_shape("dC", stage.sizes)}, is_forward=False)
        for key, shape in kept.items():
            phase.bring(key, shape, key[:2] in again)
        if last is not None:
            phase.take_weight(last)
        phase.add(backward_tasks(phase.chunks, self.wanted))
        products = range(phase.last + 1)
        self._gradients = [phase.result(0, "dA") if self.wanted[0].dgrad else None]
        self._gradients += [phase.outcome(p, name) for name in ("dB", "dbias") for p in products]
        phase.end_of_task("finish")
        self.may_defer = phase.deferred is not None
        if phase.deferred is not None and not self.plans[phase.deferred].relayouts["dB"]:
            self.late_if_deferred = [1 + phase.deferred]
        self._backward = _Runner(phase, sum(want.dgrad + want.wgrad for want in self.wanted))

    def __str__(self) -> str:
        """Return the program's tasks in order, with the collectives that they start."""
        phases = {"forward": self._forward.lines, "backward": self._backward.lines if self.is_wanted else ()}
        return "\n".join("\n  ".join([name, *lines]) for name, lines in phases.items() if lines)

    def forward(
        self, step: StepState, tensors: Sequence[Tensor | None], weight: Tensor | None = None, owner: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """C of the last product as it is stored, and what backward needs, in the order of `kept`.

        Args:
            tensors: A, the weights, and the biases or None, as they are stored.
            weight: the one that is needed first, as it was passed, if its gather may be started ahead.
            owner: by what the order of weights is known, see `ndtp.runtime.weight_prefetch.owner_of`.
        """
        slots: list[Any] = [None] * self._forward.size
        slots[STEP], slots[WEIGHT], slots[OWNER] = step, weight, owner
        slot = FIRST
        for x in tensors:
            if x is not None:
                slots[slot] = x
                slot += 1
        self._forward.run(slots, step)
        return slots[self._c], [slots[i] for i in self._kept]

    def backward(
        self,
        step: StepState,
        grad: Tensor,
        kept: list[Tensor],
        held: Container[tuple[int, str]] = (),
        weight: Tensor | None = None,
        owner: Any = None,
        defers: bool = False,
        leaves: Mapping[tuple[int, str], Tensor | None] = NO_LEAVES,
    ) -> list[Tensor | Move | None]:
        """dA of the first product as it is stored; dB and dbias of every product, or their moves, not waited for.

        Args:
            kept: what forward kept; emptied, since what is used up must not live until the end of the chain.
            held: gradients (product, "dB" or "dbias") whose moves stop before an all-reduce.
            weight, owner: as for forward, of the weight that backward needs first.
            defers: leave a part of the last gradient of a weight to the chain that follows, see `may_defer`.
            leaves: the parameters whose gradients (product, "dB" or "dbias") are, for error feedback.
        """
        slots: list[Any] = [None] * self._backward.size
        slots[STEP], slots[WEIGHT], slots[OWNER], slots[HELD], slots[DEFERS] = step, weight, owner, held, defers
        slots[LEAVES], slots[FIRST] = leaves, grad
        slots[FIRST + 1 : FIRST + 1 + len(self._kept)] = kept
        kept.clear()
        self._backward.run(slots, step)
        return [None if slot is None else slots[slot] for slot in self._gradients]


class _Runner:
    """The functions of a phase, one after the other.

    Args:
        products: of the phase, as all ranks count them.
    """

    def __init__(self, phase: Phase, products: int) -> None:
        self.size, self.products = len(phase.shapes), products
        self.lines, self._tasks = phase.lines, phase.tasks
        self._runs: tuple[Run, ...] = tuple(chain.from_iterable(runs for _, runs in phase.tasks))

    def run(self, slots: list[Any], step: StepState) -> None:
        recorder, recheck = step.recording.recorder, step.recheck
        if recheck is not None and (wanted := recheck.due(self.products)):
            with recheck.looking(wanted, self.products) as look:
                self._run_tasks(slots, recorder, look)
        elif recorder is not None or _profiler_enabled():
            self._run_tasks(slots, recorder)
        else:
            for run in self._runs:
                run(slots)

    def _run_tasks(self, slots: list[object], recorder: Any, look: Looking | None = None) -> None:
        is_watched = recorder is not None or _profiler_enabled()
        for title, runs in self._tasks:
            if look is not None and title is not None:
                look.title = title[3], PHASES.get(title[1], "forward")
            with span(recorder, *title) if is_watched and title is not None else NOTHING:
                for run in runs:
                    run(slots)


class Programs:
    """The programs of a process grid, by all that they were bound to; the least recently used ones go first.

    A key holds the objects themselves that it names, plans among them: no other one can come to have their identity.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Program] = OrderedDict()
        self._ways: OrderedDict[Hashable, Way] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: Hashable) -> Program | None:
        program = self._found.get(key)
        if program is not None:
            self._found.move_to_end(key)
        return program

    def add(self, key: Hashable, program: Program) -> Program:
        self._found[key] = program
        while len(self._found) > MOST_PROGRAMS:
            self._found.popitem(last=False)
        return program

    def way(self, key: Hashable, bind: Callable[[], Way]) -> Way:
        """Return the way of a tensor through its steps, bound where it is met first."""
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = bind()
            while len(self._ways) > MOST_PROGRAMS:
                self._ways.popitem(last=False)
        else:
            self._ways.move_to_end(key)
        return way

    def clear(self) -> None:
        self._found.clear()
        self._ways.clear()
