"""Functions that run on gathered operands: what they write to one comes back into the shards that it was made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ndtp.compute.torch_calls import TorchFunction
from ndtp.errors import LayoutError
from ndtp.split.copies import copied_into, share_memory, written
from ndtp.split.same_rows import given_whole
from ndtp.split.tensor import mapped, name_of


@dataclass(slots=True)
class _Operand:
    """A split tensor, its whole, and how that was before the function ran.

    Attributes:
        numbers: those of the whole, where another operand is of the same tensor; else None.
    """

    x: Any
    whole: Tensor
    node: Any
    version: int
    numbers: Tensor | None


class GatheredOperands:
    """The whole tensors that a function takes in the place of split ones.

    A write is told by the count of changes that torch keeps of each tensor, so it does not matter which operand a
    function changes, how that is named, or in which list it stands.

    Args:
        kind: the class of the split tensors.
        whole: gathers one.
        cut: the shard of a whole tensor, given the split one.
        leave: the shard of a split one, which shares its memory.
        view: makes of a view of a whole tensor, given with both tensors, what stands for a view of the split one.
    """

    def __init__(
        self,
        kind: Any,
        whole: Callable[[Any], Tensor],
        cut: Callable[[Any, Tensor], Tensor],
        leave: Callable[[Any], Tensor],
        view: Callable[[Tensor, Tensor, Any], Any],
    ) -> None:
        self._kind, self._whole, self._cut, self._leave, self._view = kind, whole, cut, leave, view
        self._made: dict[int, _Operand] = {}
        self._roots: Counter[int] = Counter()

    def of(self, x: Any) -> Tensor:
        """Return the whole of a split tensor, gathered once however often it is an operand; a collective."""
        if id(x) not in self._made:
            made, numbers = counted(self._whole(x)), None
            if self._roots[root_of(x)] > 1:
                made = made.clone() if x.link is not None and share_memory(made, x) else made
                numbers = made.detach().clone()
            self._made[id(x)] = _Operand(x, made, made.grad_fn, made._version, numbers)
        return self._made[id(x)].whole

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the function's result, in which a split operand stands for its whole tensor.

        Raises:
            LayoutError: the function gives an operand other sizes, or writes to parts of one tensor that overlap.
        """
        operands: dict[int, Tensor] = {}
        mapped([args, kwargs], lambda x: operands.setdefault(id(x), x), Tensor)
        self._roots.update(map(root_of, operands.values()) if len(operands) > 1 else ())
        given, named = mapped(list(args), self.of, self._kind), mapped(dict(kwargs), self.of, self._kind)
        with given_whole(next(iter(self._made.values())).x, func, args) if self._made else nullcontext():
            result = func(*given, **named)
        sets = name_of(func) == ".data" and result is None  # torch does not count this change
        is_received = receives(func, result)
        for each in self._made.values():
            x, made = each.x, each.whole
            if made._version == each.version and not is_received and not (sets and x is args[0]):
                continue
            if made.shape != x.shape:
                raise LayoutError(
                    f"parallelize: {name_of(func)} gives a split tensor {tuple(x.shape)} other sizes, "
                    f"{tuple(made.shape)}, in place\n  fix: the function that returns a new tensor"
                )
            if each.numbers is not None and not share_memory(made, x) and self._has_changed(x, each.numbers):
                raise LayoutError(
                    f"parallelize: {name_of(func)} writes to parts of one split tensor that overlap, one of them "
                    f"{tuple(x.shape)}, and each was gathered for it\n  fix: write to one after the other"
                )
            # Autograd sees the way back of a write that it saw; any other write changes numbers alone.
            with torch.set_grad_enabled(made.grad_fn is not each.node):
                self._bring_back(x, made)
        return self._with_operands(result)

    def _has_changed(self, x: object, before: Tensor) -> bool:
        """Return whether what was written to another operand has changed the numbers of this one; a collective."""
        now = self._whole(x).detach()
        return bool(((now != before) & ~((now != now) & (before != before))).any())

    def _bring_back(self, x: Any, made: Tensor) -> None:
        if not share_memory(made, x):
            shard = self._cut(x, made)
            with torch._C.DisableTorchFunctionSubclass():
                copied_into(self._leave(x), shard, getattr(x, "spec", None))
        written(x)

    def _with_operands(self, result: Any) -> Any:
        """Put split operands in the place of their whole tensors, and of views of these what stands for views."""
        if isinstance(result, (list, tuple)) and any(isinstance(x, (Tensor, list, tuple)) for x in result):
            made = [self._with_operands(x) for x in result]
            return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
        if type(result) is not Tensor or result.layout is not torch.strided:
            return result
        memory = result.untyped_storage()._cdata
        for each in self._made.values():
            if result is each.whole:
                return each.x
            if each.whole.untyped_storage()._cdata == memory:
                return self._view(result, each.whole, each.x)
        return result


def root_of(x: Any) -> int:
    """Return what tells the memory of the tensor that this one is a view of, directly or by links."""
    while getattr(x, "link", None) is not None:
        x = x.link.base
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return x.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError):  # sparse ones have no such memory, nor those of torch.func
        return id(x)


def receives(func: TorchFunction, result: object) -> bool:
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
