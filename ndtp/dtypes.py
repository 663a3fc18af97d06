"""The dtypes that ndtp computes in, by name.  Without torch: the planner runs where there is none."""

from __future__ import annotations

from typing import Any

Dtype = Any  # a name such as "bf16", torch's own, or the bytes of an element

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}  # bytes of an element
LOW_PRECISION = ("bfloat16", "float16")  # summed in fp32
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def name_of(dtype: Dtype) -> str:
    """Return the long name of a dtype: "bfloat16" of "bf16" and of `torch.bfloat16`."""
    name = f"{dtype} bytes" if isinstance(dtype, int) else str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def size_of(dtype: Dtype) -> int:
    """Return the bytes of an element."""
    if isinstance(dtype, int):
        return dtype
    size = SIZES.get(name_of(dtype))
    return int(dtype.itemsize) if size is None else size
