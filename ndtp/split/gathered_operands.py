"""Functions that run on gathered operands: what they write to one comes back into the shards that it was made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.errors import LayoutError
from ndtp.split.copies import share_memory
from ndtp.split.tensor import mapped, name_of


class GatheredOperands:
    """The whole tensors that a function takes in the place of split ones.

    A write is told by the count of changes that torch keeps of each tensor, so it does not matter which operand a
    function changes, how that is named, or in which list it stands.

    Args:
        kind: the class of the split tensors.
        whole: gathers one.
        bring_back: brings a changed whole tensor into the memory of the split one.
        view: makes of a view of a whole tensor, given with both tensors, what stands for a view of the split one.
    """

    def __init__(
        self,
        kind: Any,
        whole: Callable[[Any], Tensor],
        bring_back: Callable[[Any, Tensor], None],
        view: Callable[[Tensor, Tensor, Any], Any],
    ) -> None:
        self._kind, self._whole, self._bring_back, self._view = kind, whole, bring_back, view
        self._made: dict[int, tuple[Any, Tensor, Any, int]] = {}

    def of(self, x: Any) -> Tensor:
        """Return the whole of a split tensor, gathered once however often it is an operand; a collective."""
        if id(x) not in self._made:
            made = counted(self._whole(x))
            if self._made and x.link is not None and share_memory(made, x):  # another may be a view of the same tensor
                made = made.clone()
            self._made[id(x)] = x, made, made.grad_fn, made._version
        return self._made[id(x)][1]

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the function's result, in which a split operand stands for its whole tensor.

        Raises:
            LayoutError: the function gives an operand other sizes.
        """
        given, named = mapped(list(args), self.of, self._kind), mapped(dict(kwargs), self.of, self._kind)
        result = func(*given, **named)
        sets = name_of(func) == ".data" and result is None  # torch does not count this change
        is_received = receives(func, result)
        for x, made, node, version in self._made.values():
            if made._version == version and not is_received and not (sets and x is args[0]):
                continue
            if made.shape != x.shape:
                raise LayoutError(
                    f"parallelize: {name_of(func)} gives a split tensor {tuple(x.shape)} other sizes, "
                    f"{tuple(made.shape)}, in place\n  fix: the function that returns a new tensor"
                )
            # Autograd sees the way back of a write that it saw; any other write changes numbers alone.
            with torch.set_grad_enabled(made.grad_fn is not node):
                self._bring_back(x, made)
        return self._with_operands(result)

    def _with_operands(self, result: Any) -> Any:
        """Put split operands in the place of their whole tensors, and of views of these what stands for views."""
        if isinstance(result, (list, tuple)) and any(isinstance(x, (Tensor, list, tuple)) for x in result):
            made = [self._with_operands(x) for x in result]
            return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
        if type(result) is not Tensor or result.is_meta or result.layout is not torch.strided:
            return result
        memory = result.untyped_storage()._cdata
        for x, whole, _, _ in self._made.values():
            if result is whole:
                return x
            if whole.untyped_storage()._cdata == memory:
                return self._view(result, whole, x)
        return result


def receives(func: Any, result: Any) -> bool:
    """Return whether a function is a collective of torch, whose writes torch does not count; then it has ended."""
    if getattr(func, "__module__", "") != "torch.distributed.distributed_c10d":
        return False
    if hasattr(result, "wait"):
        result.wait()
    return True


def counted(x: Tensor) -> Tensor:
    """A tensor of which torch counts the changes: the tensor itself, or in inference mode a copy."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
