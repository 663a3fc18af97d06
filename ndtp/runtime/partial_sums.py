"""Gradients of weights that wait for their all-reduce, while micro-batches are accumulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ndtp.collectives.turns import staying
from ndtp.runtime.joint_leaves import JointLeaves
from ndtp.runtime.versions import version_of
from ndtp.runtime.wide_gradients import sum_dtype
from ndtp.schedule.tasks import LOOKAHEAD

if TYPE_CHECKING:
    from ndtp.runtime.moves import Move


class _Expected(Protocol):
    """A gradient on its way, that will be held when it arrives."""

    number: int

    def hand_in(self) -> Tensor: ...


@dataclass
class PartialSum:
    """The sum of a weight's micro-batch gradients on this rank so far, before its all-reduce."""

    leaf: Tensor
    number: int  # of the first of them, in the order in which backward came to them
    tensor: Tensor
    move: Move


class PartialSums:
    """This rank's sums of gradients, one a weight, before the all-reduce over the axes that replicate it.

    They are never in `.grad`, where they would look finished.
    """

    def __init__(self) -> None:
        self.depth = 0  # of the contexts in which gradients are accumulated
        self._sums: dict[int, PartialSum] = {}  # by the identity of the weight
        # Those that parts in turns with this one will hold, by the weight: what takes them up need not wait for these.
        self._expected: dict[Any, list[_Expected]] = {}
        self.in_turns = False  # whether there may be any

    def __bool__(self) -> bool:
        return bool(self._sums)

    @property
    def is_accumulating(self) -> bool:
        return self.depth > 0

    @property
    def holds_back(self) -> bool:
        """Return whether an all-reduce in backward has to wait: for later gradients, or to include earlier ones."""
        return self.is_accumulating or bool(self._sums) or self.in_turns

    def expect(self, holder: Tensor | JointLeaves, late: _Expected) -> None:
        """Expect a gradient that is held when it arrives."""
        self._expected.setdefault(_key_of(holder), []).append(late)

    def hold(self, holder: Tensor | JointLeaves, number: int, gradient: Tensor, move: Move) -> None:
        """Keep the gradient of a micro-batch, which the rest of its `move` would reduce."""
        if self._expected:
            key = _key_of(holder)
            left = [late for late in self._expected.pop(key, ()) if late.number != number]
            self._expected |= {key: left} if left else {}
        if isinstance(holder, JointLeaves):
            for leaf, part in holder.parts_of(gradient):
                self.hold(leaf, number, part, move.rest_of(part))
            return
        earlier = self._sums.pop(id(holder), None)
        total = gradient.to(sum_dtype(holder))  # autocast multiplies in another
        if earlier is not None:
            total, number = total + earlier.tensor, earlier.number
        self._sums[id(holder)] = PartialSum(holder, number, total, move)
        _spare_hooks(holder)

    def take(self, holder: Tensor | JointLeaves) -> Tensor | None:
        """The sum of a weight, which is added to a gradient that goes on to its all-reduce."""
        key, leaves = _key_of(holder), [holder]
        if isinstance(holder, JointLeaves):
            parts = {i: part for i, leaf in holder.wanted() if (part := self.take(leaf)) is not None}
            total, leaves = holder.joined(parts) if parts else None, [leaf for _, leaf in holder.wanted()]
        else:
            found = self._sums.pop(id(holder), None)
            total = None if found is None else found.tensor
        for late in self._expected.pop(key, ()):
            gradient = late.hand_in().to(leaves[0].dtype)  # type: ignore[union-attr]
            total = gradient if total is None else total + gradient
            for leaf in leaves:
                _spare_hooks(leaf)  # type: ignore[arg-type]
        return total

    def taken(self) -> list[PartialSum]:
        """Return all sums, in the order in which backward came to the weights; they are kept no more."""
        waiting = sorted(self._sums.values(), key=lambda each: each.number)
        self._sums.clear()
        return waiting

    def finish(self) -> None:
        """All-reduce all sums, in the order in which backward came to the weights, and hand them to autograd."""
        reduce_in_order(self.taken())

    def discard(self) -> None:
        self._sums.clear()
        self._expected.clear()


def rounded_dtype(holder: Tensor | JointLeaves) -> torch.dtype | None:
    """Return the dtype to which a sum is rounded before its all-reduce; None where it is kept in that."""
    leaf = next(holder.wanted())[1] if isinstance(holder, JointLeaves) else holder
    return leaf.dtype if sum_dtype(leaf) != leaf.dtype else None


def _key_of(holder: Tensor | JointLeaves) -> object:
    """Return what the same parameters have in each backward."""
    return tuple(id(leaf) for _, leaf in holder.wanted()) if isinstance(holder, JointLeaves) else id(holder)


@torch.no_grad()
def reduce_in_order(waiting: Sequence[PartialSum]) -> None:
    """All-reduce sums in their order, and hand them to autograd: so hooks of the weights run, and see finished
    gradients.
    """
    for each in waiting:
        each.move.resume(each.tensor.to(each.leaf.dtype))
    with staying():
        for i, each in enumerate(waiting):
            for following in waiting[i : i + LOOKAHEAD]:  # the second flies while the first is waited for
                following.move.release_hold().start()
            _accumulate(each.leaf, each.move.wait().to(each.leaf.dtype))


def _accumulate(leaf: Any, total: Tensor) -> None:
    """Add a finished gradient to a parameter as the end of a backward does."""
    if hasattr(leaf, "_local_tensor"):
        from torch.distributed.tensor import DTensor

        total = DTensor.from_local(
            total, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf._spec.shape, stride=leaf._spec.stride
        )
        if hasattr(leaf, "_dtensor") and (leaf.dim() or vars(leaf).get("ndtp_is_handed")):  # whose sum may be plain
            total = type(leaf)(total, False, leaf.shape)
            total.ndtp_is_sum = True  # type: ignore[attr-defined]
    if leaf.requires_grad:
        torch.autograd.backward([leaf], [total])
    else:  # frozen since
        leaf.grad = total if leaf.grad is None else leaf.grad + total


def _spare_hooks(leaf: Tensor) -> None:
    """A gradient that is held back reaches autograd as None, which it would show to the hooks of the weight.

    Nothing is registered for that: torch gives a DTensor that has hooks when it is moved no further ones.
    """
    hooks = leaf._backward_hooks or {}
    for key, hook in hooks.items():
        if not isinstance(hook, _SkipsNone):
            hooks[key] = _SkipsNone(hook)
    after = leaf._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
    for key, hook in after.items():
        if not isinstance(hook, _SkipsNoChange):
            hook = after[key] = _SkipsNoChange(hook)
        hook.before = _state_of(leaf.grad)


def _state_of(grad: Tensor | None) -> tuple[int, ...]:
    return () if grad is None else (id(grad), *version_of(grad))


@dataclass(frozen=True)
class _SkipsNone:
    hook: Callable[[Tensor], Tensor | None]

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.hook(gradient)


@dataclass
class _SkipsNoChange:
    """Called when autograd is done with a parameter; calls the hook if something was added to its gradient.

    Attributes:
        before: the gradient when one was held back in this backward.
    """

    hook: Callable[[Tensor], None]
    before: tuple[int, ...] | None = None

    def __call__(self, parameter: Tensor) -> None:
        before, self.before = self.before, None
        if before is None or before != _state_of(parameter.grad):
            self.hook(parameter)
