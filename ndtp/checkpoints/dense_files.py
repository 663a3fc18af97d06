"""Safetensors files of the dense model, in and out of a model on any grid."""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.types import Device

from ndtp.checkpoints.folder import locked, sync
from ndtp.checkpoints.from_meta import materialise
from ndtp.checkpoints.guarded import parsed, read_all
from ndtp.checkpoints.pieces import Piece, Staged, Whole, whole_of
from ndtp.checkpoints.safetensors_file import BLOCK_BYTES, INDEX, NAMES, StoredBox, Writer, tensors_in
from ndtp.checkpoints.same_files import contents_of
from ndtp.errors import CheckpointError, CommunicationError
from ndtp.models.saving import blocks
from ndtp.models.state_entries import Entry
from ndtp.runtime.crew import Crew

FILE_BYTES = 5 * 10**9


def load_safetensors(
    model: nn.Module | Staged | Sequence[Staged],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: Device = None,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Fill a model, dense or on a grid, from the safetensors files of its dense twin.

    Each rank reads its parts of the tensors, through blocks of rows.  What is on the meta device gets memory for this
    rank's part first.  Of tied parameters the file may have any of the names, or all.  Values are cast to the model's
    dtypes.  Keys may be those of the model without its head (`layers.0..` for `model.layers.0..`), and the other way.

    Args:
        model: or the stages of a pipeline that this rank has, of which all ranks read theirs.
        path: a folder, a file, or the index of several files.
        strict: keys that the model or the files lack are an error; else what the files lack stays as it is.
        device: for what was on the meta device; default: that of the grid.
        block_bytes: of rows that are in memory at a time; one row at least.

    Raises:
        CheckpointError: a file that is not there or cut short, keys that are missing or that the model does not have, a
            shape or kind of numbers that is not the model's, bytes that are not those that `export_safetensors` wrote
            (files of others have no checksums).  Names the key; the same on every rank, and no parameter is changed.
        CommunicationError: a file could not be read after all was checked; on every rank.
    """
    whole = whole_of(model)
    crew = whole.crew
    whole.meet(f"load_safetensors: {path}")
    stored: dict[str, StoredBox] = {}
    chosen: list[list[StoredBox | None]] = []
    failure = ""
    contents: dict[str, str] = {}
    try:
        stored = tensors_in(path)
        contents = contents_of({each.path for each in stored.values()})
    except (CheckpointError, OSError) as error:
        failure = str(error)
    # Names and sizes, not paths: nodes may have the files in different places.
    _agree(crew, failure or "\n".join(f"{key} {each}" for key, each in sorted((stored | contents).items())))
    try:
        if not failure:
            chosen = [_chosen(piece, whole.keys, stored, strict, path) for piece in whole.pieces]
            for entry, source, piece in _sources(whole, chosen):
                if source.sums:
                    source._replace(shape=entry.real).read(entry.part(piece.rank), None)
    except (CheckpointError, OSError) as error:
        failure = str(error)
    crew.agree(failure)
    try:
        for piece in whole.pieces:
            materialise(piece.module, device)
        with torch.no_grad():
            for entry, source, piece in _sources(whole, chosen):
                _fill(entry, source, piece, block_bytes)
    except (CheckpointError, OSError) as error:
        failure = str(error)
    crew.raise_everywhere(failure, f"load_safetensors: {path}: the model is half filled")


def _sources(whole: Whole, chosen: Sequence[Sequence[StoredBox | None]]) -> Iterator[tuple[Entry, StoredBox, Piece]]:
    for piece, sources in zip(whole.pieces, chosen, strict=True):
        for entry, source in zip(piece.entries(), sources, strict=True):
            if source is not None:
                yield entry, source, piece


def _chosen(
    piece: Piece, every: Sequence[tuple[str, ...]], stored: dict[str, StoredBox], strict: bool, path: Any
) -> list[StoredBox | None]:
    """Return the stored tensors that fill each entry of a piece; `every` has the keys of the whole model."""
    model, entries = piece.module, piece.entries()
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    theirs: dict[str, str] = {}
    for keys in every:
        for key in keys:
            for name in (key, key.removeprefix(f"{prefix}."), f"{prefix}.{key}"):
                if name in stored and name not in theirs:
                    theirs[name] = key
                    break
    of_key = {key: name for name, key in theirs.items()}
    ignored: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    foreign = [key for key in stored if key not in theirs and not _matches(key, ignored)]
    if strict and foreign:
        raise CheckpointError(f"{path}: '{foreign[0]}' {stored[foreign[0]]} is no key of the model{_more(foreign)}")
    chosen: list[StoredBox | None] = []
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


def _fill(entry: Entry, source: StoredBox, piece: Piece, block_bytes: int) -> None:
    part = entry.part(piece.rank)
    if entry.stored != entry.real:
        entry.local.zero_()
    mine = entry.local[tuple(slice(0, each.stop - each.start) for each in part)]
    source._replace(shape=entry.real).read(part, mine, block_bytes)


def _agree(crew: Crew, signature: str) -> None:
    """Check that all ranks found the same in their files."""
    by_rank = crew.differing(signature)
    if by_rank is None:
        return
    (first, one), *others = by_rank.items()
    rank, other = next((rank, text) for rank, text in others if text != one)
    pairs = zip(one.split("\n"), other.split("\n"), strict=False)
    mine, theirs = next((pair for pair in pairs if pair[0] != pair[1]), (one.split("\n")[-1], other.split("\n")[-1]))
    raise CheckpointError(
        f"load_safetensors: ranks find different files: rank {first}: {mine}; rank {rank}: {theirs}\n"
        "  fix: the same files on every machine"
    )


def export_safetensors(
    model: nn.Module | Staged | Sequence[Staged],
    folder: str | os.PathLike[str],
    *,
    file_bytes: int = FILE_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Write a model, dense or on a grid, as safetensors files of its dense twin, with its config if it has one.

    A collective: tensors are gathered in blocks of rows, which rank 0 writes.  Tied parameters are written once.
    `from_pretrained` of transformers reads the folder.  Files have their names when they are complete, the index last.

    Args:
        model: or the stages of a pipeline that this rank has: the first rank of each stage writes files of its own, at
            the same time as others, with one index of all.
        file_bytes: files of this size at most, as far as one tensor is no larger; several have an index.
        block_bytes: of rows that are gathered at a time.

    Raises:
        CheckpointError: a parameter on the meta device, or of a dtype that the format does not have; other ranks, which
            are no part of this, write to the folder, too.
        CommunicationError: a rank could not write; on every rank.
    """
    whole, folder = whole_of(model), Path(folder)
    crew = whole.crew
    whole.meet(f"export_safetensors: {folder}")
    crew.agree("; ".join(filter(None, (*map(unwritable, whole.pieces), crew.only_writer(folder)))), EXPORT)
    with ExitStack() as held:
        failure, token = "", ""
        if crew.is_first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(folder))
                # Files that an index names stay as they are until another index is in its place.
                token = f"-{secrets.token_hex(4)}" * (folder / f"model{INDEX}").exists()
            except OSError as error:
                failure = str(error)
        (failure, token), *_ = (said for _, said in sorted(crew.gather([failure, token]).items()))
        if failure:
            raise CommunicationError(f"export_safetensors: {folder} stays as it was: {failure}")
        parts = {piece.index: _files(piece, file_bytes) for piece in whole.pieces}
        said = whole.per_piece(lambda piece: [({key: _bytes(e) for key, e in part}) for part in parts[piece.index]])
        table = [(index, sizes) for index in sorted(said) for sizes in said[index]]
        names = [f"model{token}-{i + 1:05}-of-{len(table):05}.safetensors" for i in range(len(table))]
        names = names if len(names) > 1 else ["model.safetensors"]
        for piece in whole.pieces:
            own = [name for name, (index, _) in zip(names, table, strict=True) if index == piece.index]
            for name, members in zip(own, parts[piece.index], strict=True):
                failure = _write(folder / name, members, piece, block_bytes) or failure
        crew.raise_everywhere(failure, f"export_safetensors: {folder} is not complete")
        if crew.is_first:
            try:
                first: Any = whole.pieces[0].module
                files = dict(zip(names, (sizes for _, sizes in table), strict=True))
                finish_folder(first, folder, files, getattr(first, "dtype", None))
            except OSError as error:
                failure = str(error)
        crew.raise_everywhere(failure, f"export_safetensors: {folder} is not complete")


EXPORT = "export_safetensors: {}"


def unwritable(piece: Piece) -> str:
    for entry in piece.entries():
        if entry.local.is_meta or entry.local.dtype not in NAMES:
            what = "on the meta device" if entry.local.is_meta else f"of {entry.local.dtype}"
            return f"'{entry.keys[0]}' is {what}, which no file can hold"
    return ""


def _write(path: Path, members: Sequence[tuple[str, Entry]], piece: Piece, block_bytes: int) -> str:
    """One file, on the first rank of its piece; what went wrong."""
    writer, failure = None, ""
    if piece.rank == 0:
        try:
            writer = Writer(path, {key: (e.local.dtype, e.dense) for key, e in members})
        except OSError as error:
            failure = str(error)
    for key, entry in members:
        for row, values in blocks(entry, piece.mesh, block_bytes):
            if writer is not None and not failure:
                try:
                    writer.write(key, row, values)
                except OSError as error:
                    failure = str(error)
    if writer is not None:
        try:
            writer.close(complete=not failure)
        except OSError as error:
            failure = str(error)
    return failure


def _files(piece: Piece, file_bytes: int) -> list[list[tuple[str, Entry]]]:
    """Return the entries that a piece writes, file by file."""
    # Of the names of a tied tensor, the one that transformers keeps.
    tied: Any = getattr(piece.module, "all_tied_weights_keys", None) or {}
    parts: list[list[tuple[str, Entry]]] = [[]]
    filled = 0
    for entry in piece.entries():
        if entry.keys[0] in piece.elsewhere:
            continue
        if parts[-1] and filled + _bytes(entry) > file_bytes:
            parts.append([])
            filled = 0
        parts[-1].append((next((key for key in entry.keys if key not in tied), entry.keys[0]), entry))
        filled += _bytes(entry)
    return parts


def _bytes(entry: Entry) -> int:
    return entry.local.element_size() * int(torch.Size(entry.real).numel())


def finish_folder(model: Any, folder: Path, files: dict[str, dict[str, int]], dtype: torch.dtype | None) -> None:
    """Write the index, and the configs that say which model it is; files of an earlier export go.

    Args:
        files: what each file has, key -> bytes.
        dtype: of the weights, which the config names.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".config.") as made:
        for name in ("config", "generation_config"):
            config: Any = getattr(model, name, None)
            if hasattr(config, "save_pretrained"):
                config = copy.copy(config)
                if name == "config":
                    config.architectures = getattr(config, "architectures", None) or [type(model).__name__]
                    config.dtype = dtype if dtype is not None else getattr(config, "dtype", None)
                config.save_pretrained(made)
        index = folder / f"model{INDEX}"
        sizes = sum(sum(part.values()) for part in files.values())
        places = {key: name for name, part in files.items() for key in part}
        if len(files) > 1:
            (Path(made) / index.name).write_text(
                json.dumps({"metadata": {"total_size": sizes}, "weight_map": places}, indent=2)
            )
        before = _files_of(index)
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name == index.name):  # the index last
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(path, folder / path.name)
    if len(files) == 1:
        index.unlink(missing_ok=True)
    else:
        before.add("model.safetensors")
    for name in before - set(files):
        (folder / name).unlink(missing_ok=True)
    sync(folder)


def _files_of(index: Path) -> set[str]:
    """The files that an index names, if there is one, in its own folder."""
    try:
        places = parsed(read_all(index), index).get("weight_map")
    except CheckpointError:
        return set()
    names = places.values() if isinstance(places, dict) else ()
    return {
        name for name in names if isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors")
    }
