"""Biases and activations behind products: alone or in one pass with a product or with the sum of its parts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ndtp.collectives.handles import Route
from ndtp.runtime import closures
from ndtp.runtime.closures import Get, Run, SlotList
from ndtp.runtime.moves import is_matrix
from ndtp.runtime.slots import letters_of
from ndtp.runtime.weight_gradients import WeightGradients


class Finishes(WeightGradients):
    """The activations of a phase, see `Slots`.

    A product of which nothing is scattered may have bias and activation, or the activation's gradient, in its epilogue.
    What a reduce-scatter brings may be added up in one pass with them.  `gemm.fuses` says whether it has such kernels.
    """

    def _activation(self, p: int) -> str:
        """The activation behind product p."""
        return self.stages[p].activation or "identity"

    def _fuses(self, p: int) -> bool:
        return self._activation(p) != "identity" and self.gemm.fuses(self._activation(p), self.dtype)

    def _keeps(self, p: int) -> bool:
        """Return whether backward wants what the activation before product p takes."""
        return self.wanted[p].dgrad or self.wanted[p].again("a")

    # -------------------------------------------------------------------------------------------- with the product

    def multiply_finished(self, p: int, name: str, i: int | None) -> bool:
        """Multiply with what follows, if that is one pass, and return whether it is."""
        following = p + 1 if name == "C" else p - 1  # whose operand the result becomes
        if not 0 <= following <= self.last or not is_matrix(self.stages[p].plan) or self.stages[p].plan.relayouts[name]:
            return False
        before, is_gathered = min(p, following), self._lands_in_place(following, "A" if name == "C" else "dC")
        if is_gathered or not self._fuses(before) or (name == "dA" and (before, "pre", i) not in self.tensors):
            return False
        operand, weight = self.tensors[p, "A" if name == "C" else "dC", i], self.tensors[p, "B", None]
        how = letters_of(self.stages[p].plan, name), self.shapes[operand], self.shapes[weight]
        activation = self._activation(before)
        if name == "dA":
            backward = self.gemm.bound_finish_backward(*how, activation, self.dtype)
            if backward is None:
                return False
            self.tensors[p, name, i] = result = self.result_of(p, name, self.chunks)
            self.finished[before, "dC", i] = result
            pre = self.tensors[before, "pre", i]
            self.runs.append(_multiply_finish_backward(result, backward, operand, weight, pre))
            return True
        forward = self.gemm.bound_finish(*how, activation, self.dtype)
        if forward is None:
            return False
        self.tensors[p, name, i] = pre = self.result_of(p, name, self.chunks)
        self.finished[following, "A", i] = result = self.slot(self.shapes[pre])
        bias, keeps = self._bias(p), self._keeps(following)
        self.runs.append(_multiply_finish(pre, result, forward, operand, weight, bias, keeps))
        return True

    def _lands_in_place(self, p: int, name: str) -> bool:
        """Return whether an activation is put where a gather wants this rank's part, see `own_place`."""
        return bool(self.stages[p].plan.relayouts[name]) and not self.collectives.orders_by_stream

    # --------------------------------------------------------------------------------------- with the sum of its parts

    def wait_unless_finished(self, p: int, name: str, i: int | None) -> None:
        """`wait`, unless what arrives is added up in one pass with what follows it."""
        moving = self.moving.get((p, name, i))
        is_between = (name == "C" and p < self.last) or (name == "dA" and p > 0)
        if moving is not None and is_between and moving.place is None and len(moving.way.legs) == 1:
            (leg,) = moving.way.legs
            if isinstance(leg, Route) and leg.kind == "reduce_scatter" and self._fuses(p if name == "C" else p - 1):
                return
        self.wait(p, name, i)

    def activate(self, p: int, name: str, i: int | None) -> None:
        """The operand of a product, out of the result of another one."""
        if name == "dC":
            self._activate_backward(p, i)
            return
        before, tensors = p - 1, self.tensors
        moving = self.moving.pop((before, "C", i), None) if self.is_forward else None
        if self.is_forward:
            pre = tensors.pop((before, "C", i), None) if moving is None else moving.slot
            assert pre is not None
            if self._keeps(p):
                tensors[before, "pre", i] = pre
            if (done := self.finished.pop((p, "A", i), None)) is not None:
                tensors[p, "A", i] = done
                return
        else:
            pre = tensors[before, "pre", i] if self.wanted[p].dgrad else tensors.pop((before, "pre", i))
        bias, activation = self._bias(before) if self.is_forward else None, self._activation(before)
        width = self.stages[p].plan.shard_shape("A", self.stages[p].sizes)[-1]
        is_fused = moving is not None or (bias is not None and self._fuses(before))
        if bias is not None and not is_fused:
            self.runs.append(closures.add(pre, bias))
        tensors[p, "A", i] = result = self.slot((*self.shapes[pre][:-1], width))
        out = self.own_place(p, "A", i, result, pre if moving is None else self.stored[p, "B"])
        if is_fused:
            how = self.gemm.finish, bias, activation, self._keeps(p), out, moving is not None
            self.runs.append(_finish(pre, result, *how))
        else:
            self.runs.append(closures.activate(result, self.gemm.activate, (pre,), activation, out))
        self.clear(self.let_go(pre))

    def _activate_backward(self, p: int, i: int | None) -> None:
        """The gradient of product p, out of the gradient of what the activation behind it made."""
        tensors, moving = self.tensors, self.moving.pop((p + 1, "dA", i), None)
        pre, activation = tensors.pop((p, "pre", i)), self._activation(p)
        if (done := self.finished.pop((p, "dC", i), None)) is not None:
            tensors.pop((p + 1, "dA", i))
            tensors[p, "dC", i] = done
            self.clear(self.let_go(pre))
            return
        grad = tensors.pop((p + 1, "dA", i)) if moving is None else moving.slot
        tensors[p, "dC", i] = result = self.slot(self.shapes[pre])
        out = self.own_place(p, "dC", i, result, pre)
        if moving is None:
            self.runs.append(closures.activate(result, self.gemm.activate_backward, (grad, pre), activation, out))
        else:
            finish = self.gemm.finish_backward
            self.runs.append(_finish_backward(grad, pre, result, finish, activation, out))
        self.clear(self.let_go(grad, pre))

    def _bias(self, p: int) -> int | None:
        """The slot of the bias of a product, which is there from now on."""
        if (p, "bias", None) in self.moving:
            self.wait(p, "bias", None)
        return self.tensors.get((p, "bias", None))

    def add_bias(self, p: int, tensor: int) -> None:
        """Add the bias of a product to it, where nothing else follows."""
        bias = self._bias(p)
        if bias is not None:
            self.runs.append(closures.add(tensor, bias))


def _finish(
    pre: int,
    result: int,
    function: Callable[..., tuple[Tensor | None, Tensor]],
    bias: int | None,
    name: str,
    keep: bool,
    out: Get | None,
    is_moving: bool,
) -> Run:
    """The sum of what a collective brings, bias and activation in one pass.

    Args:
        pre: the slot of the product, or of the collective that scatters it; afterwards of what the activation took.
    """

    def run(slots: SlotList) -> None:
        added, place = None if bias is None else slots[bias], None if out is None else out(slots)

        def then(blocks: Tensor) -> tuple[Tensor | None, Tensor]:
            return function(blocks, added, name, keep, place)

        slots[pre], slots[result] = slots[pre].wait(then) if is_moving else then(slots[pre][None])

    return run


def _finish_backward(
    grad: int, pre: int, result: int, function: Callable[..., Tensor], name: str, out: Get | None
) -> Run:
    """The sum of what a collective brings and the gradient of an activation in one pass."""

    def run(slots: SlotList) -> None:
        place = None if out is None else out(slots)
        slots[result] = slots[grad].wait(lambda blocks: function(blocks, slots[pre], name, place))

    return run


def _multiply_finish(
    pre: int,
    result: int,
    product: Callable[..., tuple[Tensor | None, Tensor]],
    one: int,
    other: int,
    bias: int | None,
    keep: bool,
) -> Run:
    """A product with bias and activation in its epilogue."""

    def run(slots: SlotList) -> None:
        added = None if bias is None else slots[bias]
        slots[pre], slots[result] = product(slots[one], slots[other], added, keep)

    return run


def _multiply_finish_backward(
    result: int, product: Callable[[Tensor, Tensor, Tensor], Tensor], one: int, other: int, pre: int
) -> Run:
    """A product with the gradient of an activation in its epilogue."""

    def run(slots: SlotList) -> None:
        slots[result] = product(slots[one], slots[other], slots[pre])

    return run
