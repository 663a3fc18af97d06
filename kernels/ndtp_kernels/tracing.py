"""What a profiler sees: "gemm [M N K]" with its flops and bytes.  Free when no profiler is running."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()


def record(
    op: str, m: int, n: int, k: int, batch: Sequence[int], a: Tensor, out_dtype: torch.dtype, products: int
) -> contextlib.AbstractContextManager[object]:
    """A range named after the product, with flops and bytes as its arguments."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    times = math.prod(batch)
    flops = 2 * times * m * n * k * products
    num_bytes = times * ((m * k + products * k * n) * a.element_size() + m * n * out_dtype.itemsize)
    return torch.profiler.record_function(f"{op} [{m} {n} {k}]", f"flops={flops} bytes={num_bytes}")


def record_pass(
    op: str, m: int, n: int, x: Tensor, out_dtype: torch.dtype
) -> contextlib.AbstractContextManager[object]:
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    num_bytes = x.numel() * x.element_size() + m * n * out_dtype.itemsize
    return torch.profiler.record_function(f"{op} [{m} {n}]", f"bytes={num_bytes}")
