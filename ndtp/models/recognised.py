"""The way in which a stock model is split: by its known layers, or by what one run of it shows.

Layers that are known (attention, MLPs, experts, a vocabulary) run on plain tensors of local sizes and as one schedule,
which costs the host less.  A trial on a copy without memory tells whether they are all that a model has.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ndtp.algebra.schemes import BlockLayouts
from ndtp.errors import LayoutError
from ndtp.models.named_plan import BY_PLAN
from ndtp.models.placing import stock_model
from ndtp.models.roles import is_wrapper, names_hidden_size
from ndtp.models.transformer import Split
from ndtp.nn.sharded import shadow_of
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.process_grid import ProcessGrid

LEFT = 0.05  # of the parameters


def is_recognised(model: nn.Module, mesh: ProcessGrid, layouts: BlockLayouts, *arguments: Any, **options: Any) -> bool:
    """Return whether nearly all parameters of a stock model belong to known layers, or to layers with adapters."""
    if "ndtp_stage" in vars(model) or stock_model(model) is not model or any(map(is_wrapper, model.modules())):
        return True
    if not mesh.grid.nontrivial((*layouts.up_weight.axes, *layouts.down_weight.axes)):
        return names_hidden_size(model)
    shadow, _ = shadow_of(model, mesh)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            split = Split(shadow, mesh, layouts, *arguments, **options)
            split.run()
    except (LayoutError, ValueError):
        return False
    return _left(shadow, split) <= LEFT * sum(p.numel() for p in shadow.parameters())


def _left(model: nn.Module, split: Split) -> int:
    """Elements of matrices and stacks that stayed whole, but for routers, and what was to stay."""
    stay = [*split.scores, *(name for name, why in split.kept.items() if why == BY_PLAN)]
    count = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not any(name.startswith(f"{each}.") for each in stay):
            local: Any = parameter if is_plain(parameter) else parameter._local_tensor  # type: ignore[attr-defined]
            count += parameter.numel() if local.numel() == parameter.numel() else 0
    return count
