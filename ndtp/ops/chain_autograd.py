"""A bound chain of products under autograd: one node for the chain, and one for each gradient that arrives late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndtp.compute.torch_calls import AutogradContext
from ndtp.compute.traces import refuse_batched, refuse_second
from ndtp.ops.moving import as_own
from ndtp.runtime.arrival import Deferred, arrived, is_plain, taken_in
from ndtp.runtime.moves import Move
from ndtp.runtime.program import NO_LEAVES, Program
from ndtp.runtime.versions import refuse_changed, version_of
from ndtp.runtime.weight_prefetch import owner_of

if TYPE_CHECKING:
    from ndtp.runtime.step_state import StepState


def run_chain(
    program: Program,
    step: StepState,
    given: Sequence[Any],
    tensors: Sequence[Any],
    shards: Sequence[Any],
    layers: Sequence[nn.Module] = (),
) -> Tensor:
    """C of the last product, with a graph behind it.

    Args:
        given: the operands as they were passed: A, the weights, and the biases or None.
        tensors: the same, cast.
        shards: of these, this rank's.
        layers: the modules of which the weights are, if they are of any.
    """
    call = _Call(program, step)
    if shards is not tensors or program.late or program.may_defer:
        late = program.late + program.late_if_deferred
        shards = list(shards)
        for i, x in enumerate(tensors):
            if i in late:
                shards[i], call.deferred[i] = taken_in(x, step.late.backward.numbers, given[i])
            elif program.needs[i] and x is not shards[i]:
                shards[i], call.specs[i] = x, x
    # Of other tensors autograd itself watches those that it saves; A that was gathered is not needed as it was.
    for i in program.operands:
        x = given[i]
        if (i > 0 and x.is_leaf) or not is_plain(x):
            call.watched.append((i, x, version_of(x)))
    first, last = program.ends
    if first is not None:
        call.ahead = _known_weight(first, given, shards, layers)
    if last is not None:
        call.ahead_backward = _known_weight(last, given, shards, layers)
    c: Tensor = _Chain.apply(call, *shards)  # type: ignore[no-untyped-call]
    if call.deferred and c.grad_fn is not None:
        step.late.backward.numbers.end_product()
        step.note_uses(program.names, all(each.holder is not None for each in call.deferred.values()))
    return c


def _known_weight(
    p: int, given: Sequence[Any], shards: Sequence[Any], layers: Sequence[nn.Module]
) -> tuple[Tensor | None, object]:
    """The weight of a product as it was passed, and by what its order is known; not of one that was cast."""
    weight = given[p + 1]
    owner = owner_of(weight, layers[p] if p < len(layers) else None)
    return (None, None) if owner is None or weight.dtype != shards[p + 1].dtype else (weight, owner)


class _Call:
    """One run of a bound chain: what its backward needs to know of the operands that were passed.

    Attributes:
        deferred: gradients that take collectives and arrive late, by their places among the operands.
        specs: DTensors that autograd sees as they are, by their places.
        watched: operands that backward multiplies by, and the versions that forward saw.
        ahead, ahead_backward: the weights that are needed first, and by what their order is known.
    """

    __slots__ = ("ahead", "ahead_backward", "deferred", "program", "specs", "step", "watched")

    def __init__(self, program: Program, step: StepState) -> None:
        self.program, self.step = program, step
        self.deferred: dict[int, Deferred] = {}
        self.specs: dict[int, Any] = {}
        self.watched: list[tuple[int, Any, tuple[int, ...]]] = []
        self.ahead = self.ahead_backward = _NOTHING

    def check_unchanged(self) -> None:
        """Refuse operands that changed since forward and that backward multiplies by, also where a gathered copy was
        kept.

        Raises:
            RuntimeError: as torch's own, where one was changed in place since forward.
        """
        for i, x, version in self.watched:
            name, plan = ("A", 0) if i == 0 else ("B", i - 1)
            refuse_changed(x, version, f"{name} of MatMul '{self.program.plans[plan].name}'")

    def leaves(self) -> dict[tuple[int, str], Tensor | None]:
        """Return the parameters whose gradients arrive late, by product and gradient."""
        count = len(self.program.plans)
        return {
            (i - 1, "dB") if i <= count else (i - 1 - count, "dbias"): deferred.leaf
            for i, deferred in self.deferred.items()
        }

    def held(self, next_functions: Sequence[Any]) -> set[tuple[int, str]]:
        """Gradients that stop before an all-reduce: for those of later micro-batches, or to take up earlier ones."""
        count, edges, held = len(self.program.plans), iter(next_functions), set()
        keeps = self.step.partial_sums.is_accumulating  # and lets go what nobody takes
        for i, shape in enumerate(self.program.shapes):
            arrival = None if shape is None else next(edges)[0]  # there is one for every tensor
            deferred = self.deferred.get(i)
            if deferred is None or i not in self.program.late:
                continue
            if deferred.accumulates(arrival) or (keeps and deferred.is_dropped(arrival)):
                held.add((i - 1, "dB") if i <= count else (i - 1 - count, "dbias"))
        return held


_NOTHING: tuple[Any, Any] = (None, None)


class _Chain(torch.autograd.Function):
    """Products in a chain; tensors are A, then the weights, then the biases (or None)."""

    @staticmethod
    def forward(ctx: AutogradContext, call: _Call, *tensors: Any) -> Tensor:
        if call.specs:
            tensors = tuple([x._local_tensor if i in call.specs else x for i, x in enumerate(tensors)])
        c, kept = call.program.forward(call.step, tensors, *call.ahead)
        ctx.call = call
        ctx.save_for_backward(*kept)
        return as_own(c, *kept)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        program, step = call.program, call.step
        refuse_batched(grad, " -> ".join([plan.name for plan in program.plans]))
        step.late.enter()
        if torch.is_grad_enabled():
            refuse_second(" -> ".join([plan.name for plan in program.plans]), "MatMul ")
        call.check_unchanged()
        kept = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: each goes when its product is done
        held = call.held(ctx.next_functions) if step.partial_sums.holds_back else ()
        leaves = call.leaves() if program.feeds_back else NO_LEAVES
        gradients = program.backward(step, grad, kept, held, *call.ahead_backward, program.may_defer, leaves)
        if call.deferred:
            _expect(call, gradients, grad, bool(held))
        for i, x in call.specs.items():
            gradients[i] = arrived(gradients[i], x)
        return None, *gradients


def _expect(call: _Call, gradients: list[object], grad: Tensor, takes_up: bool) -> None:
    """Put placeholders in the places of gradients that are on their way."""
    late, sums, started = call.step.late, call.step.partial_sums, []
    for i, move in enumerate(gradients):
        if not isinstance(move, Move):
            continue
        deferred = call.deferred.get(i)
        if deferred is not None and move.is_under_way:
            deferred.late = late.expect(move, deferred.holder if move.hold else None, sums)
            started.append(deferred.late)
            gradients[i] = grad.new_zeros(()).expand(call.program.shapes[i] or ())  # which the arrival drops
        else:
            gradients[i] = move.wait()
    late.came_through(started, sums if takes_up else None)
