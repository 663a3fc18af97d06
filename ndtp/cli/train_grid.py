"""The check of `ndtp train` that a grid divides its sizes, before any rank is started: on ranks that do not exist."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import OTHER_AXES, TENSOR_AXES
from ndtp.errors import LayoutError
from ndtp.measure.volume import fake_group
from ndtp.models.byte_model import ByteModel
from ndtp.runtime.process_grid import ProcessGrid

if TYPE_CHECKING:
    from ndtp.cli.job import Job


def check_grid(job: Job) -> None:
    """Check that the grid of a job divides its batch, and the sizes of the byte-level model.

    Raises:
        LayoutError: it does not; names options with which it would, tried out, too.
    """
    why = _refusal(job)
    if not why:
        return
    fitting = next((each for each in _nearest(job) if not _refusal(each)), None)
    now, then = _options(job), {} if fitting is None else _options(fitting)
    changed = " ".join(f"{option} {size}" for option, size in then.items() if size != now[option])
    other = "another --grid, such as those of `ndtp plan`"
    raise LayoutError(f"train: {why}\n  fix: {f'{changed}, or {other}' if changed else other}")


def _options(job: Job) -> dict[str, int]:
    return {"--width": job.sizes.width, "--heads": job.sizes.heads, "--batch": job.batch}


def _refusal(job: Job) -> str:
    """Return why a job does not lie on its grid; "" where it does."""
    grid, sequences = Grid(job.grid), job.batch // job.micro_batches
    try:
        if job.config is not None:  # whose layers are padded
            data = tuple(axis for axis in grid if axis not in TENSOR_AXES)
            Layout(grid, data).shard_shape((sequences,))
            return ""
        with fake_group(grid.num_ranks), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.device("meta"):
                model = ByteModel(replace(job.sizes, layers=1))
            model.to_grid(ProcessGrid(grid, device_type="cpu"), job.scheme, 1).volume(sequences, job.context)
    except LayoutError as error:
        return str(error).partition("\n  fix: ")[0]
    return ""


def _nearest(job: Job) -> list[Job]:
    """Return jobs that ranks may divide: with more sequences, with a wider model, with more heads."""
    count = math.prod(job.grid.values())
    split = math.prod(size for axis, size in job.grid.items() if axis not in OTHER_AXES)
    rows = count if job.config is not None else count // math.gcd(count, job.context)
    found = [job]
    for heads in dict.fromkeys((job.sizes.heads, -(-job.sizes.heads // split) * split)):
        unit = math.lcm(2 * heads, count)
        width = -(-job.sizes.width // unit) * unit
        found.append(replace(job, sizes=replace(job.sizes, width=width, inner=4 * width, heads=heads)))
    every = rows * job.micro_batches
    batch = -(-job.batch // every) * every
    return [replace(each, batch=size) for each in found for size in (job.batch, batch)]
