"""Safetensors files of the dense model, in and out of a model on any grid."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.types import Device

from ndtp.checkpoints.export_folder import ExportFolder
from ndtp.checkpoints.folder import Written
from ndtp.checkpoints.from_meta import materialise
from ndtp.checkpoints.pieces import Piece, Staged, Whole, whole_of
from ndtp.checkpoints.safetensors_file import BLOCK_BYTES, METADATA, NAMES, StoredBox, Writer, tensors_in
from ndtp.errors import CheckpointError
from ndtp.models.saving import blocks
from ndtp.models.state_entries import Entry
from ndtp.runtime.crew import Crew, failure_of

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
    contents: dict[str, str] = {}

    def look() -> None:
        stored.update(tensors_in(path))
        contents.update(contents_of({each.path for each in stored.values()}))

    def check() -> None:
        chosen.extend(_chosen(piece, whole.keys, stored, strict, path) for piece in whole.pieces)
        for entry, source, piece in _sources(whole, chosen):
            if source.sums:
                source._replace(shape=entry.real).read(entry.part(piece.rank), None)

    def fill() -> None:
        for piece in whole.pieces:
            materialise(piece.module, device)
        with torch.no_grad():
            for entry, source, piece in _sources(whole, chosen):
                _fill(entry, source, piece, block_bytes)

    failure = failure_of(look)
    # Names and sizes, not paths: nodes may have the files in different places.
    _agree(crew, failure or "\n".join(f"{key} {each}" for key, each in sorted((stored | contents).items())))
    crew.agree(failure or failure_of(check))
    crew.raise_everywhere(failure_of(fill), f"load_safetensors: {path}: the model is half filled")


def _sources(whole: Whole, chosen: Sequence[Sequence[StoredBox | None]]) -> Iterator[tuple[Entry, StoredBox, Piece]]:
    for piece, sources in zip(whole.pieces, chosen, strict=True):
        for entry, source in zip(piece.entries(), sources, strict=True):
            if source is not None:
                yield entry, source, piece


def _chosen(
    piece: Piece, every: Sequence[tuple[str, ...]], stored: dict[str, StoredBox], strict: bool, path: object
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
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    foreign = [key for key in stored if key not in theirs and not _matches(key, ignored)]
    if strict and foreign:
        raise CheckpointError(f"{path}: '{foreign[0]}' {stored[foreign[0]]} is no key of the model{_more(foreign)}")
    chosen: list[StoredBox | None] = []
    missing = []
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
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
    crew, first = whole.crew, whole.pieces[0].module
    whole.meet(f"export_safetensors: {folder}", one_folder=True)
    crew.agree(failure_of(lambda: check_writable(whole, folder)), "export_safetensors: {}")
    before = f"export_safetensors: {folder} stays as it was"
    with closing(ExportFolder(folder)) as target:
        crew.alone(lambda: target.open(first, getattr(first, "dtype", None)), before)
        parts = {piece.index: _files(piece, file_bytes) for piece in whole.pieces}
        said = whole.per_piece(lambda piece: [({key: _bytes(e) for key, e in part}) for part in parts[piece.index]])
        failure, written = "", list[Written]()
        for piece in whole.pieces:
            number = sum(len(said[index]) for index in said if index < piece.index)
            for i, members in enumerate(parts[piece.index], number + 1):
                failure = _write(target.partial / f"{i:05}.safetensors", members, piece, block_bytes, written, failure)
        files = sorted(Written(*each) for files in crew.gather_done(failure, written, before) for each in files)
        sizes = [each for index in sorted(said) for each in said[index]]
        crew.alone(lambda: target.finish(list(zip(files, sizes, strict=True))), UNFINISHED.format(before))


UNFINISHED = "{}, at least its weights"  # a config may be the new one


def check_writable(whole: Whole, folder: Path) -> None:
    """Check that files can hold what a model has, and, on the first rank, that no others write to the folder.

    Raises:
        CheckpointError: they cannot, or others do.
    """
    for entry in (entry for piece in whole.pieces for entry in piece.entries()):
        if entry.local.is_meta or entry.local.dtype not in NAMES:
            what = "on the meta device" if entry.local.is_meta else f"of {entry.local.dtype}"
            raise CheckpointError(f"'{entry.keys[0]}' is {what}, which no file can hold")
        if METADATA in entry.keys:
            raise CheckpointError(
                f"'{METADATA}' is no name of a tensor in a safetensors file\n  fix: another name of the parameter"
            )
    if failure := whole.crew.only_writer(folder):
        raise CheckpointError(failure)


def _write(
    path: Path,
    members: Sequence[tuple[str, Entry]],
    piece: Piece,
    block_bytes: int,
    written: list[Written],
    failure: str,
) -> str:
    """Write a file on the first rank of its piece, unless it has failed before.  Returns its failure."""
    writers: list[Writer] = []
    if piece.rank == 0 and not failure:
        forms = {key: (entry.local.dtype, entry.dense) for key, entry in members}
        failure = failure_of(lambda: writers.append(Writer(path, forms)))
    for key, entry in members:
        for row, values in blocks(entry, piece.mesh, block_bytes):
            if writers and not failure:
                failure = failure_of(partial(writers[0].write, key, row, values))
    if writers:
        complete = not failure
        at_end = failure_of(lambda: written.append(Written(path.name, *writers[0].close(complete))))
        failure = failure or at_end
    return failure


def _files(piece: Piece, file_bytes: int) -> list[list[tuple[str, Entry]]]:
    """Return the entries that a piece writes, file by file."""
    # Of the names of a tied tensor, the one that transformers keeps.
    tied = getattr(piece.module, "all_tied_weights_keys", None) or {}
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


SAMPLES, SAMPLE_BYTES = 16, 4096


def contents_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return for each file, by name, its size and a hash of blocks of bytes that are spread over it."""
    found = {}
    for path in sorted(paths):
        size = os.path.getsize(path)
        seen = hashlib.blake2b(digest_size=6)
        with path.open("rb") as file:
            for place in range(SAMPLES):
                file.seek(size * place // SAMPLES)
                seen.update(file.read(SAMPLE_BYTES))
        found[path.name] = f"{size:,} bytes, {seen.hexdigest()}"
    return found
