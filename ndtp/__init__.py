"""High-dimensional tensor parallelism for PyTorch.

Layouts over named grids of processes, the collectives that each product of two laid-out tensors needs, overlapped with
the local GEMMs, differentiated, and counted to the byte.

Nothing is imported before it is used: planning needs no torch, and training none of what tests and measures.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtp import nn as nn
    from ndtp import testing as testing
    from ndtp.algebra.grid import Grid
    from ndtp.algebra.layout import Layout
    from ndtp.algebra.matmul_plan import MatMulPlan
    from ndtp.algebra.wire import Wire
    from ndtp.checkpoints import checkpoint as checkpoint
    from ndtp.checkpoints.pretrained import save_pretrained
    from ndtp.collectives.meter import CommMeter
    from ndtp.errors import (
        CaptureError,
        CheckpointError,
        CommunicationError,
        CorruptionError,
        GridError,
        LayoutError,
        MismatchError,
    )
    from ndtp.measure.links import links
    from ndtp.measure.profile import profile
    from ndtp.models.nonfinite import find_nonfinite
    from ndtp.models.parallelize import parallelize
    from ndtp.models.profile import use_profile
    from ndtp.models.rechecked import recheck
    from ndtp.ops.mapped import Mapped, einsum
    from ndtp.ops.products import batch_matmul, matmul, relayout
    from ndtp.ops.resharding import reshard
    from ndtp.pipelines.pipeline import Pipeline
    from ndtp.pipelines.stage import PipelineStage
    from ndtp.pipelines.whole_models import pipeline_stages
    from ndtp.planner.search import plan
    from ndtp.planner.sequence import plan_sequence
    from ndtp.runtime.captured import capture
    from ndtp.runtime.process_grid import ProcessGrid
    from ndtp.split.register import register_rule

__version__ = "0.1.0"

_HOME = {
    "CaptureError": "errors",
    "CheckpointError": "errors",
    "CommMeter": "collectives.meter",
    "CommunicationError": "errors",
    "CorruptionError": "errors",
    "Grid": "algebra.grid",
    "GridError": "errors",
    "Layout": "algebra.layout",
    "LayoutError": "errors",
    "Mapped": "ops.mapped",
    "MatMulPlan": "algebra.matmul_plan",
    "MismatchError": "errors",
    "Pipeline": "pipelines.pipeline",
    "PipelineStage": "pipelines.stage",
    "ProcessGrid": "runtime.process_grid",
    "Wire": "algebra.wire",
    "batch_matmul": "ops.products",
    "capture": "runtime.captured",
    "einsum": "ops.mapped",
    "find_nonfinite": "models.nonfinite",
    "links": "measure.links",
    "matmul": "ops.products",
    "parallelize": "models.parallelize",
    "pipeline_stages": "pipelines.whole_models",
    "plan": "planner.search",
    "plan_sequence": "planner.sequence",
    "profile": "measure.profile",
    "recheck": "models.rechecked",
    "register_rule": "split.register",
    "relayout": "ops.products",
    "reshard": "ops.resharding",
    "save_pretrained": "checkpoints.pretrained",
    "use_profile": "models.profile",
}
# Modules whose paths are shorter than where they lie, or were documented before there were packages.
_MOVED = {
    "block_cost": "planner.block_cost",
    "checkpoint": "checkpoints.checkpoint",
    "buffers": "collectives.buffer_ring",
    "cost": "algebra.volume",
    "hardware": "planner.hardware",
    "memory": "ops.memory",
    "plan_scaling": "planner.scaling",
    "schemes": "algebra.schemes",
    "spans": "collectives.recorder",
}

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CommMeter",
    "CommunicationError",
    "CorruptionError",
    "Grid",
    "GridError",
    "Layout",
    "LayoutError",
    "Mapped",
    "MatMulPlan",
    "MismatchError",
    "Pipeline",
    "PipelineStage",
    "ProcessGrid",
    "Wire",
    "batch_matmul",
    "capture",
    "einsum",
    "find_nonfinite",
    "links",
    "matmul",
    "parallelize",
    "pipeline_stages",
    "plan",
    "plan_sequence",
    "profile",
    "recheck",
    "register_rule",
    "relayout",
    "reshard",
    "save_pretrained",
    "use_profile",
]


def __getattr__(name: str) -> Any:
    if name in ("integrations", "nn", "planner", "testing", *_MOVED):
        return import_module(f"ndtp.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ndtp' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"ndtp.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Return the public surface: the names of `__all__`, the packages beside them, and what every module has."""
    return sorted(
        [*__all__, "checkpoint", "nn", "testing", "__all__", "__doc__", "__file__", "__name__", "__version__"]
    )


class _Moved:
    """Finds a module by the path that it had: the same module, under both names."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, stem = name.rpartition(".")
        return ModuleSpec(name, _Moved) if package == "ndtp" and stem in _MOVED else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> Any:
        module = import_module(f"ndtp.{_MOVED[spec.name.rpartition('.')[2]]}")
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state  # which importlib has just replaced


sys.meta_path.insert(0, _Moved)  # type: ignore[arg-type]

_DISTRIBUTED = sys.modules.get("torch.distributed")
if _DISTRIBUTED is None or not _DISTRIBUTED.is_available() or not _DISTRIBUTED.is_initialized():
    # NCCL reads it once, when its first communicator is made: see `ndtp.collectives.nccl.keep_order`.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # a rank of torchrun, which keeps its store
        import_module("ndtp.collectives.fresh_store").meet_afresh()
# CUDA reads it with the first graph: kernels of a graph keep the priorities of the streams that they were captured on.
os.environ.setdefault("CUDA_GRAPHS_USE_NODE_PRIORITY", "1")
