"""The dtypes that ndtp computes in, by name.  Without torch: the planner runs where there is none."""

from __future__ import annotations

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}  # bytes of an element
LOW_PRECISION = ("bfloat16", "float16")  # summed in fp32
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
