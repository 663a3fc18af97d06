"""Checkpoints of a training run, in the shapes of the dense model: written on one grid, read on any other, or on none.

torch's distributed checkpoint (DCP) does the writing and reading.  Each rank describes its part of every dense tensor,
of a parameter as of what an optimizer keeps for it, and DCP brings the parts of one grid to those of another.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from ndtp.checkpoints.dcp_part import Part
from ndtp.checkpoints.optimizer_state import Kept, fresh_state, kept_by, names_in, restore_groups, together
from ndtp.checkpoints.pieces import Piece, Staged, Whole, whole_of
from ndtp.errors import CheckpointError
from ndtp.models.state_entries import replaced, tensors_of
from ndtp.runtime.chunk_choices import ChunkChoices

RUN = "training.json"
FORMAT = 1
_FAILURES = (OSError, RuntimeError, ValueError, CheckpointException)


def save(
    model: nn.Module | Staged | Sequence[Staged],
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
        model: or the stages of a pipeline that this rank has, one or several: all ranks of all stages write the whole
            model, of which a tied weight is written once.
        optimizer: any of torch's; of all parameters of this rank's stages; None: the model alone.
        folder: on a file system that all ranks see.
        extra: what else the program wants back, of numbers, texts, lists and dicts: its step, a scheduler's state.
            That of rank 0 is kept.
        chunks: keep what `chunks="auto"` has come to, so that a run that goes on with this on the same grid measures
            nothing, and cuts its products alike.

    Raises:
        CheckpointError: an optimizer of other parameters than the model's, a value that JSON does not have, a parameter
            on the meta device; other ranks, which are no part of this, write to the folder, too.  Before anything is
            written.
        CommunicationError: a rank could not write; on every rank.  The checkpoint of before stays.
    """
    folder, whole = Path(folder), whole_of(model)
    crew = whole.crew
    whole.meet(f"save: {folder}")
    partial = folder.with_name(f"{folder.name}.partial")
    parts: dict[str, Any] = {}
    every: list[Kept] = []

    def describe() -> None:
        for piece in whole.pieces:
            for entry in piece.entries():
                if entry.local.is_meta:
                    raise CheckpointError(f"save: '{entry.keys[0]}' is on the meta device, and has no values")
                if entry.keys[0] not in piece.elsewhere:
                    parts[f"model.{entry.keys[0]}"] = Part(entry, piece.rank)
        every.extend([Kept()] * len(whole.pieces) if optimizer is None else kept_by(optimizer, whole.pieces))
        if failure := crew.only_writer(folder):
            raise CheckpointError(f"save: {failure}")

    crew.agree(_failure(describe))
    run = _run(whole, every, chunks, dict(extra or {}))
    text = ""

    def write_down() -> None:
        nonlocal text
        try:
            text = json.dumps(run)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"save: JSON lacks what extra or a group of the optimizer has: {error}") from None

    crew.agree(_failure(write_down))

    def prepare() -> None:
        if crew.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        for kept in every:
            parts.update(kept.tensors)
        dcp.save(parts, checkpoint_id=partial, **crew.for_dcp)

    def finish() -> None:
        if crew.is_first:
            (partial / RUN).write_text(text)
            _swap(partial, folder)

    for step in (prepare, write, finish):
        crew.raise_everywhere(_failure(step), f"save: {folder} stays as it was")


def _run(whole: Whole, every: Sequence[Kept], chunks: bool, extra: dict[str, Any]) -> dict[str, Any]:
    """What is no tensor, of all pieces."""

    def chosen(piece: Piece) -> dict[str, Any] | None:
        mesh = piece.mesh
        return {"grid": str(mesh.grid), **mesh.step.chunks.to_json()} if chunks and mesh is not None else None

    kept = {piece.index: each for piece, each in zip(whole.pieces, every, strict=True)}
    said = whole.per_piece(lambda piece: (kept[piece.index].groups, kept[piece.index].values, chosen(piece)))
    parts = [said[index] for index in sorted(said)]
    groups, values, choices = parts[0]
    if whole.count > 1:
        if groups is not None:
            groups, values = together((each or [], more) for each, more, _ in parts)
        choices = [each for *_, each in parts] if chunks else None
    run = {"format": FORMAT, "groups": groups, "values": values, "extra": extra}
    return run if choices is None else run | {"chunks": choices}


def load(
    model: nn.Module | Staged | Sequence[Staged], optimizer: Optimizer | None, folder: str | os.PathLike[str]
) -> dict[str, Any]:
    """Read what `save` wrote, on any grid or in stages, into a model and its optimizer on any other, or on none.

    A collective.  Everything is read into new memory first, a copy of this rank's parameters, so that an error changes
    nothing.  The settings of the optimizer's groups come back, too, but for how it runs (`foreach`, `fused`); and, on
    the same grid, the numbers of chunks that `save` was asked to keep, for products that have not run here yet.

    Args:
        model, optimizer: as for `save`; the stages may be others, and as many or not.

    Returns:
        The `extra` of `save`.

    Raises:
        CheckpointError: no checkpoint, one that is cut short, of another model or optimizer; names the key.  The same
            on every rank, and nothing is changed.
    """
    whole, folder = whole_of(model), _complete(Path(folder))
    crew = whole.crew
    whole.meet(f"load: {folder}")
    found: list[Any] = []
    every: list[Kept] = []

    def look() -> None:
        metadata, run = _read(folder)
        found.extend((run, [_keys(piece, whole, metadata, folder) for piece in whole.pieces]))
        if optimizer is not None:
            every.extend(fresh_state(optimizer, whole, metadata, run, folder))

    frame = "load: {}; nothing was changed"
    crew.agree(_failure(look), frame)
    run, keys = found
    fresh = {id(x): torch.zeros_like(x) for piece in whole.pieces for x in tensors_of(piece.module)}
    # One after the other: two stages of a rank may have a weight in common, each another part of it.
    wanted: list[dict[str, Any]] = [{} for _ in range(whole.rounds)]
    for i, piece in enumerate(whole.pieces):
        with replaced(piece.module, fresh):
            wanted[i] = {keys[i][entry.keys]: Part(entry, piece.rank) for entry in piece.entries()}
        if optimizer is not None:
            wanted[i] |= every[i].tensors

    def read() -> None:
        for each in wanted:
            dcp.load(each, checkpoint_id=folder, **crew.for_dcp)

    crew.agree(_failure(read), frame)
    with torch.no_grad():
        for piece in whole.pieces:
            for x in tensors_of(piece.module):
                x.copy_(fresh[id(x)])
    if optimizer is not None:
        optimizer.state.clear()
        for kept in every:
            optimizer.state.update(kept.states)
        restore_groups(optimizer, names_in(every), run["groups"])
    choices = _choices(run)
    for piece in whole.pieces:
        kept_ones = choices[piece.index] if len(choices) == whole.count else None
        if piece.mesh is not None and kept_ones and kept_ones.get("grid") == str(piece.mesh.grid):
            piece.mesh.step.chunks.restore(kept_ones)
    return run["extra"]


def _choices(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of chunks, by the stage."""
    choices = run.get("chunks", [])
    return choices if isinstance(choices, list) else [choices]


def _keys(piece: Piece, whole: Whole, metadata: Metadata, folder: Path) -> dict[tuple[str, ...], str]:
    """Keys of a tensor -> that under which the checkpoint has it; that the two have the same tensors."""
    stored = {k.removeprefix("model."): v for k, v in metadata.state_dict_metadata.items() if k.startswith("model.")}
    keys: dict[tuple[str, ...], str] = {}
    for entry in piece.entries():
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
    known = {key for group in whole.keys for key in group}
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
        for choices in _choices(run) if isinstance(run, dict) else ():
            ChunkChoices().restore(choices)
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
