"""Constants of the host on a device: each is copied there once.

A copy from the host makes the host wait, and no CUDA graph holds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # constant -> device -> copy
_INVERSES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # order -> its inverse
_IN_GRAPHS: dict[int, Tensor] = {}  # what a graph has read, whose memory it will read again


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors that any later code may use: none of inference mode, and none of a mode that fakes tensors."""
    with torch.inference_mode(False), _disable_current_modes():
        yield


def constant_on(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that nobody writes to on a device; the same copy as long as the tensor lives."""
    if x.device == device:
        return _held(x)
    if torch.compiler.is_compiling():
        return x.to(device)
    copies: dict[torch.device, Tensor] = _COPIES.setdefault(x, {})
    if device not in copies:
        with lasting():
            copies[device] = x.to(device)
    return _held(copies[device])


def inverse_on(order: Tensor, device: torch.device) -> Tensor:
    """Return the inverse of an order, a constant tensor of indices, on a device."""
    if torch.compiler.is_compiling():
        return order.argsort().to(device)
    inverse: Tensor | None = _INVERSES.get(order)
    if inverse is None:
        with lasting():
            inverse = _INVERSES[order] = order.argsort()
    return constant_on(inverse, device)


def numbers_on(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device, which nobody may write to."""
    if torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _held(_numbers_on(tuple(numbers), device, dtype))


def is_captured(device: torch.device) -> bool:
    """Return whether a graph is being captured of what runs on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def zeros_on(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros on a device, which nobody may write to: the same ones to all who ask for this shape."""
    if torch.compiler.is_compiling() or is_captured(device):
        return torch.zeros(shape, device=device, dtype=dtype)  # what a graph fills is filled when it runs
    return _zeros_on(tuple(shape), device, dtype)


def indices_on(x: Tensor, device: torch.device) -> Tensor:
    """Return indices that the host computes anew at every call on a device, where equal ones are one copy."""
    if x.device == device:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.to(device)
    data = x.detach().contiguous().numpy().tobytes()
    return _held(_indices_on(data, tuple(x.shape), x.dtype, device))


def _held(x: Tensor) -> Tensor:
    """Keep for good what a graph reads that is captured now."""
    if is_captured(x.device):
        _IN_GRAPHS[id(x)] = x
    return x


@lru_cache(maxsize=64)
def _indices_on(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with lasting():
        if not data:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).to(device)


@lru_cache(maxsize=64)
def _zeros_on(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with lasting():
        return torch.zeros(shape, device=device, dtype=dtype)


@lru_cache(maxsize=1024)
def _numbers_on(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with lasting():
        return torch.tensor(numbers, dtype=dtype, device=device)
