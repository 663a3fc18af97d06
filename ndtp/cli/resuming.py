"""A run of `ndtp train` that goes on: what of it stays as it began, and the grid of `--resume auto`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ndtp.checkpoints import folder as folders
from ndtp.cli.train_data import OtherRunError, check_same
from ndtp.cli.train_model import same_model
from ndtp.errors import GridError

if TYPE_CHECKING:
    from ndtp.cli.job import Job
    from ndtp.planner.grid_plan import GridPlan

# Options of what a run keeps from its first step to its last; where another model has a key, it is --model's.
OPTIONS = {"seed": "--seed", "dtype": "--dtype", "layers": "--layers", "heads": "--heads"}


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


def begun_with(job: Job) -> dict[str, Any]:
    """Return what of a run stays from its first step to its last: its model, the dtype of that, and its seed.

    Tensors tell nothing of the number of heads, of a base of wavelengths or of an activation.  What steps to come may
    have otherwise is not in it: the grid, the batch, the rate of learning.
    """
    model = asdict(job.sizes) if job.config is None else {"config": json.loads(job.config.read_bytes())}
    return {"seed": job.seed, "dtype": job.dtype, **model}


def check_begun(state: Mapping[str, Any], job: Job) -> None:
    """Check that a job is that of a checkpoint's run.

    Args:
        state: the checkpoint's; those of older versions do not tell.

    Raises:
        OtherRunError: it is another one; names what is other.
    """
    before, now = dict(state.get("run", {})), begun_with(job)
    if before and ("config" in before) != ("config" in now):
        models = ("the byte-level model", "a config of transformers")
        begun, asked = models["config" in before], models["config" in now]
        raise OtherRunError("--model", f"{job.output}: the run has begun with {begun}, and there is {asked} now")
    options = OPTIONS | {"": "--width" if job.config is None else "--model"}
    now = {key: value for key, value in now.items() if key in before}
    if "config" in now:
        of_before, of_now = same_model(before["config"], now.pop("config"))
        before, now = before | of_before, now | of_now
    check_same(f"{job.output}: the run has begun with", before, now, options)


def kept_in(checkpoint: Path) -> dict[str, Any]:
    """Return what a run has kept beside its tensors.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
    """
    extra: dict[str, Any] = folders.read(folders.complete(checkpoint)).run["extra"]
    return extra
