"""The ranges that a profiler sees: "gemm [M N K]", with flops and bytes where it records inputs
(`record_shapes=True`).

Free when no profiler is running.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()


def record(
    op: str, m: int, n: int, k: int, batch: Sequence[int], a: Tensor, out_dtype: torch.dtype
) -> contextlib.AbstractContextManager[object]:
    """A range named after the product; bytes are those of its operands, read once for each product of a batch."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    times = math.prod(batch)
    flops = 2 * times * m * n * k
    num_bytes = times * ((m * k + k * n) * a.element_size() + m * n * out_dtype.itemsize)
    return _range(f"{op} [{m} {n} {k}]", flops=flops, bytes=num_bytes)


def record_pass(
    op: str, m: int, n: int, x: Tensor, out_dtype: torch.dtype
) -> contextlib.AbstractContextManager[object]:
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    return _range(f"{op} [{m} {n}]", bytes=x.numel() * x.element_size() + m * n * out_dtype.itemsize)


def _range(name: str, **numbers: int) -> contextlib.AbstractContextManager[object]:
    # torch.profiler.record_function takes text and shows it nowhere.
    return torch._C._profiler._RecordFunctionFast(name, [], numbers)  # type: ignore[return-value]
