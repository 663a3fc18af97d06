"""`GradientChanges`: gradients between backward and the optimizer's step, and the changes of them that ranks compare.

Code that clips, scales or removes gradients does so on every rank alike.  Two things tell: the number by which some
entries were multiplied, and how often each gradient was written to, or that it is another one or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import string_at
from operator import attrgetter, is_not
from struct import calcsize, unpack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_grad: Any = attrgetter("grad")
_held = vars(torch._C.TensorBase)["grad"].__get__  # as it is, a bare DTensor too
_LOOKED_AT = 16  # numbers of a gradient
_CODES = {torch.float32: "f", torch.float64: "d"}  # of `struct`
Numbers = list[float] | Tensor | tuple[bytes, str]
NONE, OTHER = -1, -2  # in the place of how often a gradient was written to


class GradientChanges:
    """The gradients of one model between backward and the optimizer's step.

    Attributes:
        changed: by the number of the parameter, how often its gradient was written to, or `NONE` or `OTHER`; only
            where something was done to it.
    """

    def __init__(self) -> None:
        self._probes: list[tuple[nn.Parameter, Any]] = []
        self._factor: float | Tensor = math.nan
        self._grads: list[Any] = []
        self._versions: list[int] = []
        self.changed: tuple[tuple[int, int], ...] = ()

    def after_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        grads, versions = _seen(parameters)
        if DTensor in set(map(type, grads)):  # of torch's compiler, which reading makes ones of the grid
            grads = [*map(_grad, parameters)]
            versions = _versions(grads)
        self._grads, self._versions = grads, versions
        self._probes = []
        for p, grad in zip(reversed(parameters), reversed(grads), strict=True):
            if (numbers := _numbers(grad)) is not None:
                self._probes.append((p, numbers))
                if len(self._probes) == 2:
                    break

    def before_step(self, parameters: Sequence[nn.Parameter]) -> None:
        before, self._grads = self._grads, []
        if len(before) == len(parameters):
            now, versions = _seen(parameters)
            if versions != self._versions or any(map(is_not, now, before)):
                self.changed = tuple(_changes(before, now, self._versions, versions))
        with torch._C.DisableTorchFunctionSubclass():
            then = [_numbers(_held(p)) for p, _ in self._probes]
        factors = [_factor(first, now) for (_, first), now in zip(self._probes, then, strict=True) if now is not None]
        if factors:
            self._factor = _common(factors)
        self._probes = []

    def taken(self) -> tuple[float, tuple[tuple[int, int], ...]]:
        """Return the number by which gradients were multiplied before the last step, NaN if not one number, and what
        was done to which.  Those that nobody else has any more are let go.
        """
        found = float(self._factor), self.changed
        self._factor, self.changed, self._grads = math.nan, (), []
        return found


def told(change: int) -> str:
    return {NONE: "none", OTHER: "another one"}.get(change, f"written to {change} times")


def _seen(parameters: Sequence[nn.Parameter]) -> tuple[list[Any], list[int]]:
    """Return the gradients of parameters, as they are, and how often they were written to."""
    with torch._C.DisableTorchFunctionSubclass():  # half the time of a read: torch looks for no override
        grads = [*map(_held, parameters)]
        return grads, _versions(grads)


def _versions(grads: Sequence[Any]) -> list[int]:
    try:
        return [0 if grad is None else grad._version for grad in grads]
    except RuntimeError:  # gradients of inference, of which torch counts no changes
        return [0] * len(grads)


def _changes(before: Sequence[Any], now: Sequence[Any], first: Sequence[int], then: Sequence[int]) -> Any:
    for i, (a, b) in enumerate(zip(before, now, strict=True)):
        if a is not b:
            yield i, NONE if b is None else OTHER
        elif first[i] != then[i]:
            yield i, then[i] - first[i]


def _numbers(grad: Any) -> Numbers | None:
    """The first numbers of a gradient on this rank: their bytes, which takes no operation of torch, where that can be;
    of an accelerator's without waiting for it.  None of one of which this rank has less than two.
    """
    local: Any = getattr(grad, "_local_tensor", grad)  # of which attributes are read without torch's overrides
    if local is None or local.layout is not torch.strided:
        return None
    dtype, count = local.dtype, local.numel()
    if count < 2 or dtype.is_complex:
        return None
    if type(local) is Tensor and dtype in _CODES and local.is_cpu and local.is_contiguous():
        return string_at(local.data_ptr(), min(count, _LOOKED_AT) * dtype.itemsize), _CODES[dtype]
    with torch.no_grad():
        first = local.reshape(-1)[:_LOOKED_AT]
        return first.tolist() if first.device.type == "cpu" else first.double()


def _factor(before: Numbers, now: Numbers) -> float | Tensor:
    """Return the number by which all of some numbers were multiplied; NaN if there is none, or if all are zero.

    Two of them at least: a gradient that was clipped by value, or row by row, has one outlier that looks like it.
    """
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        first, then = torch.as_tensor(_listed(before)), torch.as_tensor(_listed(now))
        if first.device != then.device or first.shape != then.shape:
            return math.nan
        large = first.abs() * 8 >= first.abs().max()
        ratios = (then / first)[large]
        is_one = (ratios.max() - ratios.min() <= 1e-2 * ratios.abs().max()) & (large.sum() > 1)
        return torch.where(is_one, ratios.mean(), math.nan)
    if before == now:
        told = before[0] if isinstance(before, tuple) else before
        return 1.0 if any(told) else math.nan
    first, then = _listed(before), _listed(now)
    least = max(map(abs, first)) / 8
    found = [y / x for x, y in zip(first, then, strict=False) if abs(x) >= least > 0]
    if len(found) < 2 or not max(found) - min(found) <= 1e-2 * max(map(abs, found)):
        return math.nan
    return found[0]


def _common(factors: Sequence[float | Tensor]) -> float | Tensor:
    """Return the number by which several gradients were multiplied; NaN where each has its own, or where it is not
    known of one.
    """
    first, last = factors[0], factors[-1]
    if isinstance(first, Tensor) or isinstance(last, Tensor):
        first, last = torch.as_tensor(first), torch.as_tensor(last)
        return torch.where((first - last).abs() <= 1e-2 * first.abs(), first, math.nan)
    return first if abs(first - last) <= 1e-2 * abs(first) else math.nan


def _listed(numbers: Numbers) -> Any:
    """Numbers of which the bytes were taken as numbers; others as they are."""
    if not isinstance(numbers, tuple):
        return numbers
    told, code = numbers
    return unpack(f"{len(told) // calcsize(code)}{code}", told)
