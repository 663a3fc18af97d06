"""`ndtp train --resume auto`: the grid of a run that goes on with other ranks than it began with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ndtp.errors import GridError

if TYPE_CHECKING:
    from ndtp.planner.grid_plan import GridPlan


def chosen_grid(
    ranks: int, may_be_fewer: bool, batch: int, context: int, sizes: tuple[int, int, int], config: Path | None
) -> tuple[dict[str, int], str]:
    """Return the planner's grid of so many ranks, and the scheme on it; the same on every rank.

    Args:
        may_be_fewer: where no grid has as many, the largest that has fewer is taken.
        sizes: width, heads and layers of the byte-level model; `config` is of another one.

    Raises:
        typer.BadParameter: the planner finds none.
    """
    for count in range(ranks, 0 if may_be_fewer else ranks - 1, -1):
        if count == 1:
            return {}, "1d"
        for plan in _plans(count, batch * context, sizes, config):
            if batch % plan.grid["dp"] == 0 and plan.expert_axis is None:
                return {axis: plan.grid[axis] for axis in plan.grid if plan.grid[axis] > 1}, plan.scheme
    raise typer.BadParameter(
        f"no grid of {ranks} ranks divides the model and batches of {batch}; fix: another number of ranks",
        param_hint="--resume",
    )


def _plans(ranks: int, tokens: int, sizes: tuple[int, int, int], config: Path | None) -> list[GridPlan]:
    """Return the planner's grids, best first; those that pad come last, and none of them for the byte-level model."""
    from ndtp.cli.planned_model import model_at
    from ndtp.planner.block_cost import Block
    from ndtp.planner.hardware import Hardware
    from ndtp.planner.request import Request
    from ndtp.planner.search import search

    width, heads, layers = sizes
    found: list[GridPlan] = []
    try:
        if config is None:
            blocks: tuple[Block, ...] = (Block.attention(tokens, width, heads), Block.mlp(tokens, width, 4 * width))
        else:
            blocks, layers = tuple(model_at(str(config), None).blocks(tokens)), 1
    except GridError as error:
        raise typer.BadParameter(str(error), param_hint="--resume") from None
    for pad in (False, True)[: 1 + (config is not None)]:
        with suppress(GridError):  # none divides
            found += search(Request(blocks, ranks, Hardware.load("h100-ib"), layers=layers, pad=pad))
    return found
