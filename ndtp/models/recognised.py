"""Which way a stock model is split: by its layers as they are known, or by what one run of it shows.

Layers that are known (attention, MLPs, experts, a vocabulary) run on plain tensors of local sizes and as one schedule,
which costs the host less.  A trial on a copy without memory tells whether they are all that a model has.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ndtp.errors import LayoutError
from ndtp.models.transformer import Split
from ndtp.nn.sharded import shadow_of
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.dry_grid import DryGrid
from ndtp.runtime.process_grid import ProcessGrid

ENOUGH = 0.95  # of the parameters


def is_recognised(model: nn.Module, mesh: ProcessGrid, layouts: Any, *arguments: Any, **options: Any) -> bool:
    """Whether nearly all parameters of a stock model belong to layers that are known."""
    shadow, _ = shadow_of(model, mesh)
    dry: Any = DryGrid(mesh.grid, mesh.rank, mesh.backend if mesh.backend in ("gloo", "nccl") else "gloo")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            split = Split(shadow, dry, layouts, *arguments, **options)
            split.run()
    except (LayoutError, ValueError):
        return False
    total = shared = 0
    for parameter in shadow.parameters():
        local: Any = parameter if is_plain(parameter) else parameter._local_tensor  # type: ignore[attr-defined]
        total += parameter.numel()
        shared += parameter.numel() if local.numel() < parameter.numel() else 0
    return shared >= ENOUGH * total
