"""`ndtp.checkpoint`: training runs and safetensors files, in and out of a model on any grid.

ndtp.checkpoint.save(model, optimizer, "run")            # a training run, to go on with on any other grid
ndtp.checkpoint.load(model, optimizer, "run")

model = ndtp.parallelize(model, mesh)                    # made on the meta device, or not
ndtp.checkpoint.load_safetensors(model, "folder")        # reads this rank's parts
ndtp.checkpoint.export_safetensors(model, "other")       # as the dense model would be saved
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ndtp.collectives.cross_check import differing
from ndtp.errors import CheckpointError
from ndtp.models.from_meta import initialize as initialize
from ndtp.models.from_meta import materialise
from ndtp.models.safetensors_file import BLOCK_BYTES, INDEX, NAMES, Stored, Writer, read_part, tensors_in
from ndtp.models.saving import blocks, raise_everywhere
from ndtp.models.state_entries import Entry, entries_of, mesh_of_model
from ndtp.models.training_state import load as load
from ndtp.models.training_state import save as save
from ndtp.runtime.process_grid import ProcessGrid

__all__ = ["export_safetensors", "initialize", "load", "load_safetensors", "save"]

FILE_BYTES = 5 * 10**9


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, device: Any = None,
    block_bytes: int = BLOCK_BYTES,
) -> None:  # fmt: skip
    """Fill a model, dense or on a grid, from the safetensors files of its dense twin.

    Each rank reads its parts of the tensors, through blocks of rows.  What is on the meta device gets memory for this
    rank's part first.  Of tied parameters the file may have any of the names, or all.  Values are cast to the model's
    dtypes.  Keys may be those of the model without its head (`layers.0..` for `model.layers.0..`), and the other way.

    Args:
        path: a folder, a file, or the index of several files.
        strict: keys that the model or the files lack are an error; else what the files lack stays as it is.
        device: for what was on the meta device; default: that of the grid.
        block_bytes: of rows that are in memory at a time; one row at least.

    Raises:
        CheckpointError: a file that is not there or cut short, keys that are missing or that the model does not have, a
            shape or kind of numbers that is not the model's.  Names the key; the same on every rank, and no parameter
            is changed.
        CommunicationError: a file could not be read after all was checked; on every rank.
    """
    mesh = mesh_of_model(model)
    entries = entries_of(model, mesh)
    chosen: list[Stored | None] = []
    failure = ""
    try:
        stored = tensors_in(path)
        chosen = _chosen(model, entries, stored, strict, path)
    except (CheckpointError, OSError) as error:
        failure = str(error)
    # Names and sizes, not paths: nodes may have the files in different places.
    signature = failure or "\n".join(f"{e.keys[0]} {s}" for e, s in zip(entries, chosen, strict=True))
    _agree(mesh, signature, failure)
    if failure:
        raise CheckpointError(failure)
    if materialise(model, device):
        entries = entries_of(model, mesh)
    try:
        with torch.no_grad():
            for entry, source in zip(entries, chosen, strict=True):
                if source is not None:
                    _fill(entry, source, mesh, block_bytes)
    except OSError as error:
        failure = str(error)
    raise_everywhere(mesh, failure, f"load_safetensors: {path}: the model is half filled")


def _chosen(
    model: nn.Module, entries: Sequence[Entry], stored: dict[str, Stored], strict: bool, path: Any
) -> list[Stored | None]:
    """What each entry is filled from."""
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    theirs: dict[str, str] = {}
    for entry in entries:
        for key in entry.keys:
            for name in (key, key.removeprefix(f"{prefix}."), f"{prefix}.{key}"):
                if name in stored and name not in theirs:
                    theirs[name] = key
                    break
    of_key = {key: name for name, key in theirs.items()}
    ignored: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    foreign = [key for key in stored if key not in theirs and not _matches(key, ignored)]
    if strict and foreign:
        raise CheckpointError(f"{path}: '{foreign[0]}' {stored[foreign[0]]} is no key of the model{_more(foreign)}")
    chosen: list[Stored | None] = []
    missing = []
    optional: Any = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    for entry in entries:
        names = [of_key[key] for key in entry.keys if key in of_key]
        if not names and not _matches(entry.keys[0], optional):
            missing.append(entry.keys[0])
        for name in names:
            if stored[name].shape != entry.dense:
                raise CheckpointError(f"{path}: '{name}' is {stored[name]}, that of the model {entry.dense}")
            if stored[name].dtype.is_floating_point != entry.local.dtype.is_floating_point:
                raise CheckpointError(f"{path}: '{name}' is {stored[name]}, that of the model {entry.local.dtype}")
        chosen.append(stored[names[0]] if names else None)
    if strict and missing:
        raise CheckpointError(f"{path}: '{missing[0]}', a key of the model, is not in it{_more(missing)}")
    return chosen


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, key) for pattern in patterns)


def _more(keys: Sequence[str]) -> str:
    rest = f", nor are {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{rest}\n  fix: the files of this model, or strict=False"


def _fill(entry: Entry, source: Stored, mesh: ProcessGrid | None, block_bytes: int) -> None:
    part = entry.part(0 if mesh is None else mesh.rank)
    if entry.stored != entry.real:
        entry.local.zero_()
    mine = entry.local[tuple(slice(0, each.stop - each.start) for each in part)]
    read_part(source._replace(shape=entry.real), part, mine, block_bytes)


def _agree(mesh: ProcessGrid | None, signature: str, failure: str) -> None:
    """That all ranks found the same in their files, whatever it is."""
    by_rank = None if mesh is None else differing(mesh.groups, signature)
    if by_rank is None:
        return
    lines = [text.split("\n")[0] for text in by_rank.values()]
    rank = next((r for r, text in by_rank.items() if text != next(iter(by_rank.values()))), 0)
    raise CheckpointError(
        f"load_safetensors: ranks find different files: rank {next(iter(by_rank))}: {lines[0]}; rank {rank}: "
        f"{by_rank[rank].split(chr(10))[0]}\n  fix: the same files on every machine"
    )


def export_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES, block_bytes: int = BLOCK_BYTES
) -> None:
    """Write a model, dense or on a grid, as safetensors files of its dense twin, with its config if it has one.

    A collective: tensors are gathered in blocks of rows, which rank 0 writes.  Tied parameters are written once.
    `from_pretrained` of transformers reads the folder.  Files have their names when they are complete, the index last.

    Args:
        file_bytes: files of this size at most, as far as one tensor is no larger; several have an index.
        block_bytes: of rows that are gathered at a time.

    Raises:
        CheckpointError: a parameter on the meta device, or of a dtype that the format does not have.
        CommunicationError: rank 0 could not write; on every rank.
    """
    mesh, folder = mesh_of_model(model), Path(folder)
    entries = entries_of(model, mesh)
    for entry in entries:
        if entry.local.is_meta or entry.local.dtype not in NAMES:
            what = "on the meta device" if entry.local.is_meta else f"of {entry.local.dtype}"
            raise CheckpointError(f"export_safetensors: '{entry.keys[0]}' is {what}, which no file can hold")
    named = [(_key(model, entry), entry) for entry in entries]
    files = _files(named, file_bytes)
    writes = mesh is None or mesh.rank == 0
    failure = ""
    for name, members in files.items():
        writer = None
        if writes and not failure:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                writer = Writer(folder / name, {key: (e.local.dtype, e.dense) for key, e in members})
            except OSError as error:
                failure = str(error)
        for key, entry in members:
            for row, values in blocks(entry, mesh, block_bytes):
                if writer is not None and not failure:
                    try:
                        writer.write(key, row, values)
                    except OSError as error:
                        failure = str(error)
        if writer is not None:
            writer.close(complete=not failure)
    if writes and not failure:
        try:
            _finish(model, folder, files)
        except OSError as error:
            failure = str(error)
    raise_everywhere(mesh, failure, f"export_safetensors: {folder} is not complete")


def _key(model: nn.Module, entry: Entry) -> str:
    """Of the names of a tied tensor, the one that transformers keeps."""
    tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
    return next((key for key in entry.keys if key not in tied), entry.keys[0])


def _files(named: Sequence[tuple[str, Entry]], file_bytes: int) -> dict[str, list[tuple[str, Entry]]]:
    parts: list[list[tuple[str, Entry]]] = [[]]
    filled = 0
    for key, entry in named:
        size = entry.local.element_size() * int(torch.Size(entry.real).numel())
        if parts[-1] and filled + size > file_bytes:
            parts.append([])
            filled = 0
        parts[-1].append((key, entry))
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i + 1:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts)}


def _finish(model: Any, folder: Path, files: dict[str, list[tuple[str, Entry]]]) -> None:
    """The index, and what says which model it is."""
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "save_pretrained"):
            if name == "config" and not getattr(config, "architectures", None):
                config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
    index = folder / f"model{INDEX}"
    if len(files) == 1:
        index.unlink(missing_ok=True)
        return
    sizes = sum(e.local.element_size() * torch.Size(e.real).numel() for part in files.values() for _, e in part)
    places = {key: name for name, part in files.items() for key, _ in part}
    partial = index.with_name(f"{index.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps({"metadata": {"total_size": int(sizes)}, "weight_map": places}, indent=2))
    os.replace(partial, index)
    (folder / "model.safetensors").unlink(missing_ok=True)
