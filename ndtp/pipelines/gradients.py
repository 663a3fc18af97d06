"""The norm of the gradients of a model in stages, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ndtp.nn.gradients import clip_grad_norm_ as clip_on_a_grid
from ndtp.pipelines.stage import PipelineStage


@torch.no_grad()
def clip_grad_norm_(stages: Sequence[PipelineStage], max_norm: float) -> Tensor:
    """Clip the gradients of a model in stages by their norm over all of them, the same on every rank; it is returned.

    A weight that two stages share counts once.  A collective of all ranks of the pipeline.

    Args:
        stages: those of this rank.
    """
    pipeline = stages[0].pipeline
    total = torch.zeros((), dtype=torch.float64, device=stages[0].device)
    for stage in stages:
        norm = clip_on_a_grid(_counted(stage), math.inf)  # that of the stage, on each of its ranks
        total += norm.to(total) ** 2 / len(pipeline.ranks_of[stage.index])
    total = pipeline.sum(total, "norm of the gradients").sqrt()
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for stage in stages:
        for parameter in stage.submod.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return total


def _counted(stage: PipelineStage) -> list[nn.Parameter]:
    """The parameters of a stage, but for those that the first stage counts."""
    elsewhere = {id(stage.model.get_parameter(name)) for name in stage.known_as}
    return [each for each in stage.submod.parameters() if id(each) not in elsewhere]
