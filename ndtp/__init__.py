"""High-dimensional tensor parallelism for PyTorch.

Layouts over named grids of processes, the collectives that each product of two laid-out tensors needs, overlapped with
the local GEMMs, differentiated, and counted to the byte.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ndtp import nn as nn
from ndtp.contraction import MatMulPlan
from ndtp.errors import CommunicationError, GridError, LayoutError, MismatchError
from ndtp.grid import Grid
from ndtp.layout import Layout
from ndtp.meter import CommMeter
from ndtp.ops import batch_matmul, matmul, relayout
from ndtp.parallelize import parallelize
from ndtp.plan_sequence import plan_sequence
from ndtp.planner import plan
from ndtp.process_grid import ProcessGrid

if TYPE_CHECKING:
    from ndtp import testing as testing

__version__ = "0.1.0"

__all__ = [
    "CommMeter",
    "CommunicationError",
    "Grid",
    "GridError",
    "Layout",
    "LayoutError",
    "MatMulPlan",
    "MismatchError",
    "ProcessGrid",
    "batch_matmul",
    "matmul",
    "parallelize",
    "plan",
    "plan_sequence",
    "relayout",
]


def __getattr__(name: str) -> Any:
    """`ndtp.testing` is imported when it is first used: programs that train do not need it."""
    if name == "testing":
        return import_module("ndtp.testing")
    raise AttributeError(f"module 'ndtp' has no attribute {name!r}")
