"""torch's element-wise functions, and the operators that stand for some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_OF_TORCH = """
    abs acos add asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min cos cosh
    div eq erf erfc exp exp2 expm1 floor floor_divide fmod ge gt isfinite isinf isnan le log log10 log1p log2 logaddexp
    logical_and logical_not logical_or logical_xor lt maximum minimum mul nan_to_num ne neg pow reciprocal relu
    remainder round rsqrt sigmoid sign sin sinh sqrt square sub tan tanh true_divide trunc where xlogy
"""
_OF_NETWORKS = """
    celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu softplus softsign
"""
ELEMENTWISE = frozenset(
    [getattr(torch, name) for name in _OF_TORCH.split()] + [getattr(F, name) for name in _OF_NETWORKS.split()]
)


class ElementArithmetic:
    """Operators by torch's functions of elements."""

    __slots__ = ()

    def _apply(self, function: Callable[..., Any], *args: Any) -> Any:
        raise NotImplementedError

    def __add__(self, other: object) -> Any:
        return self._apply(torch.add, self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return self._apply(torch.mul, self, other)

    __rmul__ = __mul__

    def __sub__(self, other: object) -> Any:
        return self._apply(torch.sub, self, other)

    def __rsub__(self, other: object) -> Any:
        return self._apply(torch.rsub, self, other)

    def __truediv__(self, other: object) -> Any:
        return self._apply(torch.div, self, other)

    def __rtruediv__(self, other: object) -> Any:
        return self._apply(_divide_by, self, other)

    def __pow__(self, other: object) -> Any:
        return self._apply(torch.pow, self, other)

    def __neg__(self) -> Any:
        return self._apply(torch.neg, self)

    def __abs__(self) -> object:
        return self._apply(torch.abs, self)

    def __invert__(self) -> object:
        return self._apply(torch.bitwise_not, self)

    def __and__(self, other: Any) -> Any:
        return self._apply(torch.bitwise_and, self, other)

    def __or__(self, other: Any) -> Any:
        return self._apply(torch.bitwise_or, self, other)

    def __lt__(self, other: Any) -> Any:
        return self._apply(torch.lt, self, other)

    def __le__(self, other: object) -> object:
        return self._apply(torch.le, self, other)

    def __gt__(self, other: object) -> object:
        return self._apply(torch.gt, self, other)

    def __ge__(self, other: object) -> object:
        return self._apply(torch.ge, self, other)

    def __eq__(self, other: Any) -> Any:
        return self._apply(torch.eq, self, other)

    def __ne__(self, other: Any) -> Any:
        return self._apply(torch.ne, self, other)

    __hash__ = object.__hash__


def _divide_by(x: Tensor, number: Any) -> object:
    return number / x
