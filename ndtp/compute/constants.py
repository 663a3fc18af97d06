"""Constants of the host on a device: each is copied there once.

A copy from the host makes the host wait, and no CUDA graph holds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # constant -> device -> copy
_INVERSES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # order -> its inverse


def constant_on(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that nobody writes to on a device; the same copy as long as the tensor lives."""
    if x.device == device:
        return x
    if torch.compiler.is_compiling():
        return x.to(device)
    copies: dict[torch.device, Tensor] = _COPIES.setdefault(x, {})
    if device not in copies:
        copies[device] = x.to(device)
    return copies[device]


def inverse_on(order: Tensor, device: torch.device) -> Tensor:
    """Return the inverse of an order, a constant tensor of indices, on a device."""
    if torch.compiler.is_compiling():
        return order.argsort().to(device)
    inverse: Tensor | None = _INVERSES.get(order)
    if inverse is None:
        inverse = _INVERSES[order] = order.argsort()
    return constant_on(inverse, device)


def numbers_on(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device, which nobody may write to."""
    if torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _numbers_on(tuple(numbers), device, dtype)


def indices_on(x: Tensor, device: torch.device) -> Tensor:
    """Return indices that the host computes anew at every call on a device, where equal ones are one copy."""
    if x.device == device:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.to(device)
    data = x.detach().contiguous().numpy().tobytes()
    return _indices_on(data, tuple(x.shape), x.dtype, device)


@lru_cache(maxsize=64)
def _indices_on(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).view(shape).to(device)
        if data
        else torch.empty(shape, dtype=dtype, device=device)
    )


@lru_cache(maxsize=1024)
def _numbers_on(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)
