"""Checkpoints of a training run, in the shapes of the dense model: written on one grid, read on any other, or on none.

torch's distributed checkpoint (DCP) does the writing and reading.  Each rank describes its part of every dense tensor,
of a parameter as of what an optimizer keeps for it, and DCP brings the parts of one grid to those of another.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from ndtp.collectives.cross_check import differing
from ndtp.errors import CheckpointError
from ndtp.models.dcp_part import Part
from ndtp.models.optimizer_state import Kept, fresh_state, kept_by, restore_groups
from ndtp.models.saving import raise_everywhere
from ndtp.models.state_entries import entries_of, mesh_of_model, replaced, tensors_of
from ndtp.runtime.chunk_choices import ChunkChoices
from ndtp.runtime.process_grid import ProcessGrid

RUN = "training.json"
FORMAT = 1
_FAILURES = (OSError, RuntimeError, ValueError, CheckpointException)


def save(
    model: nn.Module,
    optimizer: Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    chunks: bool = False,
) -> None:
    """Write a model and its optimizer, dense or on any grid, as a folder of torch's distributed checkpoints.

    A collective; each rank writes its parts, replicas once.  Tensors have the keys (`model.<key>`) and shapes of the
    dense model, what the optimizer keeps goes by the keys of its parameters (`optimizer.state.<key>.<name>`).  All is
    written to `<folder>.partial` and renamed when it is complete: a save that is interrupted leaves the one before.

    Args:
        optimizer: any of torch's; None: the model alone.
        folder: on a file system that all ranks see.
        extra: what else the program wants back, of numbers, texts, lists and dicts: its step, a scheduler's state.
            That of rank 0 is kept.
        chunks: keep what `chunks="auto"` has come to, so that a run that goes on with this on the same grid measures
            nothing, and cuts its products alike.

    Raises:
        CheckpointError: an optimizer of other parameters than the model's, a value that JSON does not have, a parameter
            on the meta device; before anything is written.
        CommunicationError: a rank could not write; on every rank.  The checkpoint of before stays.
    """
    folder, mesh = Path(folder), mesh_of_model(model)
    rank = 0 if mesh is None else mesh.rank
    entries = entries_of(model, mesh)
    for entry in entries:
        if entry.local.is_meta:
            raise CheckpointError(f"save: '{entry.keys[0]}' is on the meta device, and has no values")
    parts = {f"model.{entry.keys[0]}": Part(entry, rank) for entry in entries}
    kept = Kept() if optimizer is None else kept_by(optimizer, model, mesh)
    run = {"format": FORMAT, "groups": kept.groups, "values": kept.values, "extra": dict(extra or {})}
    if chunks and mesh is not None:
        run["chunks"] = {"grid": str(mesh.grid), **mesh.step.chunks.to_json()}
    try:
        text = json.dumps(run)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"save: JSON lacks what extra or a group of the optimizer has: {error}") from None
    partial = folder.with_name(f"{folder.name}.partial")

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        dcp.save(parts | kept.tensors, checkpoint_id=partial, **_group(mesh))

    def finish() -> None:
        if rank == 0:
            (partial / RUN).write_text(text)
            _swap(partial, folder)

    for step in (prepare, write, finish):
        raise_everywhere(mesh, _failure(step), f"save: {folder} stays as it was")


def load(model: nn.Module, optimizer: Optimizer | None, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save` wrote, on any grid, into a model and its optimizer on any other, or on none.

    A collective.  Everything is read into new memory first, a copy of this rank's parameters, so that an error changes
    nothing.  The settings of the optimizer's groups come back, too, but for how it runs (`foreach`, `fused`); and, on
    the same grid, the numbers of chunks that `save` was asked to keep, for products that have not run here yet.

    Returns:
        The `extra` of `save`.

    Raises:
        CheckpointError: no checkpoint, one that is cut short, of another model or optimizer; names the key.  The same
            on every rank, and nothing is changed.
    """
    mesh, folder = mesh_of_model(model), _complete(Path(folder))
    rank = 0 if mesh is None else mesh.rank
    found: list[Any] = []

    def look() -> None:
        metadata, run = _read(folder)
        found.extend((metadata, run, _keys(model, mesh, metadata, folder)))
        if optimizer is not None:
            found.append(fresh_state(optimizer, model, mesh, metadata, run, folder))

    _agree(mesh, _failure(look), folder)
    _, run, keys = found[:3]
    fresh = {id(x): torch.zeros_like(x) for x in tensors_of(model)}
    with replaced(model, fresh):
        wanted: dict[str, Any] = {keys[entry.keys]: Part(entry, rank) for entry in entries_of(model, mesh)}
    if optimizer is not None:
        wanted |= found[3].tensors

    def read() -> None:
        dcp.load(wanted, checkpoint_id=folder, **_group(mesh))

    _agree(mesh, _failure(read), folder)
    with torch.no_grad():
        for x in tensors_of(model):
            x.copy_(fresh[id(x)])
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(found[3].states)
        restore_groups(optimizer, found[3], run["groups"])
    if mesh is not None and run.get("chunks", {}).get("grid") == str(mesh.grid):
        mesh.step.chunks.restore(run["chunks"])
    return run["extra"]


def _keys(model: nn.Module, mesh: ProcessGrid | None, metadata: Metadata, folder: Path) -> dict[tuple[str, ...], str]:
    """Keys of a tensor -> that under which the checkpoint has it; that the two have the same tensors."""
    stored = {k.removeprefix("model."): v for k, v in metadata.state_dict_metadata.items() if k.startswith("model.")}
    keys: dict[tuple[str, ...], str] = {}
    for entry in entries_of(model, mesh):
        key = next((key for key in entry.keys if key in stored), None)
        if key is None:
            raise CheckpointError(f"{folder}: '{entry.keys[0]}', a key of the model, is not in it")
        there = stored[key]
        if not isinstance(there, TensorStorageMetadata) or tuple(there.size) != entry.dense:
            shape = tuple(getattr(there, "size", ()))
            raise CheckpointError(f"{folder}: '{key}' has the shape {shape}, that of the model {entry.dense}")
        if there.properties.dtype.is_floating_point != entry.local.dtype.is_floating_point:
            raise CheckpointError(
                f"{folder}: '{key}' is {there.properties.dtype}, that of the model {entry.local.dtype}"
            )
        keys[entry.keys] = f"model.{key}"
    known = {key for group in keys for key in group}
    foreign = [key for key in stored if key not in known]
    if foreign:
        more = f", nor are {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise CheckpointError(f"{folder}: '{foreign[0]}' is no key of the model{more}")
    return keys


def _read(folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """What is in a checkpoint, and that its files are as long as that takes."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder\n  fix: one that ndtp.checkpoint.save wrote")
    try:
        run = json.loads((folder / RUN).read_text())
        if isinstance(run, dict) and "chunks" in run:
            ChunkChoices().restore(run["chunks"])
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:  # pickle raises whatever a foreign file makes it
        raise CheckpointError(
            f"{folder}: no complete checkpoint of ndtp.checkpoint.save: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: {RUN} is not of format {FORMAT}, the one that this version reads")
    for index, at in (metadata.storage_data or {}).items():
        path = folder / at.relative_path
        size = path.stat().st_size if path.exists() else 0
        if size < at.offset + at.length:
            raise CheckpointError(f"{folder}: '{index.fqn}' ends in {path.name} behind its {size:,} bytes: cut short")
    return metadata, run


def _complete(folder: Path) -> Path:
    """The folder; where a save was interrupted between two renames, the checkpoint of before."""
    before = _before(folder)
    return before if not folder.exists() and before.exists() else folder


def _before(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.before")


def _swap(partial: Path, folder: Path) -> None:
    before = _before(folder)
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    partial.rename(folder)
    shutil.rmtree(before, ignore_errors=True)


def _group(mesh: ProcessGrid | None) -> dict[str, Any]:
    """For DCP: the ranks of the grid."""
    if mesh is None or mesh.grid.num_ranks == 1:
        return {"no_dist": True}
    return {"process_group": mesh.groups.group(mesh.grid.nontrivial(mesh.grid.names))}


def _failure(step: Callable[[], None]) -> str:
    """What a step failed with, in one line; nothing if it did not."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
            step()
    except CheckpointError as error:
        return str(error)
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(first).__name__}: {first}"
    except _FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _agree(mesh: ProcessGrid | None, failure: str, folder: Path) -> None:
    """Raises CheckpointError: a rank that could not, on every rank."""
    by_rank = {0: failure} if mesh is None else differing(mesh.groups, failure) or {0: failure}
    for rank, text in by_rank.items():
        if text:
            where = f"rank {rank}: " if len(by_rank) > 1 else ""
            raise CheckpointError(f"load: {where}{text}; nothing was changed")
