"""Single-device Triton GEMMs for tensor-parallel blocks; knows nothing of grids or process groups.

Nothing is loaded until it is used: importing this package costs no time and touches neither Triton nor a driver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtp_kernels.choice.problem import Config
    from ndtp_kernels.choice.selection import Options
    from ndtp_kernels.choice.table import Table, choose, explain
    from ndtp_kernels.errors import KernelError, KernelFallback
    from ndtp_kernels.form import Form
    from ndtp_kernels.grouped import grouped_gemm, grouped_wgrad
    from ndtp_kernels.interface import (
        backward_gemm,
        gemm,
        reduce_blocks,
        reduce_blocks_backward,
    )

_HOME = {
    "gemm": "interface",
    "backward_gemm": "interface",
    "reduce_blocks": "interface",
    "reduce_blocks_backward": "interface",
    "grouped_gemm": "grouped",
    "grouped_wgrad": "grouped",
    "Form": "form",
    "Options": "choice.selection",
    "Config": "choice.problem",
    "Table": "choice.table",
    "choose": "choice.table",
    "explain": "choice.table",
    "tune": "tools.tuning",  # found by name alone: it stands above this door
    "KernelError": "errors",
    "KernelFallback": "errors",
}

__all__ = [
    "Config", "Form", "KernelError", "KernelFallback", "Options", "Table", "backward_gemm", "choose", "explain",
    "gemm", "grouped_gemm", "grouped_wgrad", "reduce_blocks", "reduce_blocks_backward", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ndtp_kernels.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
