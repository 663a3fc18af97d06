"""The folder of a checkpoint: a manifest beside files of tensors, whole or not there.

    checkpoint.json             what is no tensor; the names, sizes and checksums of the other files; its own checksum
    rank-00003.safetensors      the boxes of tensors that a rank has written, with their checksums

It is written beside the one before, which it replaces when all of it is on the disk.  Whoever dies at whatever moment,
one of the two is there and whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from ndtp.checkpoints import old_folders
from ndtp.checkpoints.guarded import inside, parsed, read_all
from ndtp.checkpoints.parts import Laid, Source, laid_out
from ndtp.checkpoints.safetensors_file import UNKNOWN, header_of
from ndtp.errors import CheckpointError
from ndtp.runtime.chunk_choices import ChunkChoices

MANIFEST, FORMAT = "checkpoint.json", 2
OLD_RUN, OLD_FORMAT = "training.json", 1
START = b'{"crc32": "'
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a file system that has none


class Written(NamedTuple):
    """A file of tensors, as the rank that has written it tells of it, and as the manifest has it."""

    name: str
    size: int
    header: int  # the checksum of its header, which has those of its tensors


class Content(NamedTuple):
    """The contents of a checkpoint; `signature` is the same on ranks that read the same one."""

    run: dict[str, Any]
    tensors: dict[str, Laid]
    signature: str


def manifest(run: Mapping[str, object], files: Sequence[Written]) -> bytes:
    """Raises TypeError, ValueError: JSON lacks what a run has."""
    text = json.dumps({"crc32": UNKNOWN, "format": FORMAT, "files": files, **run}).encode()
    return START + b"%08x" % crc32(text) + text[len(START) + len(UNKNOWN) :]


def read(folder: Path) -> Content:
    """Return the contents of a checkpoint, without reading its tensors.

    Raises:
        CheckpointError: no checkpoint, or one that is cut short, newer, or not what was written; names the file.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder\n  fix: one that ndtp.checkpoint.save wrote")
    if not (folder / MANIFEST).exists() and (folder / OLD_RUN).exists():
        run = parsed(text := read_all(folder / OLD_RUN), folder / OLD_RUN)
        _check_format(run, folder / OLD_RUN, OLD_FORMAT)
        sources: Sequence[Source] = old_folders.boxes_in(folder)
    else:
        path = folder / MANIFEST
        run = parsed(text := read_all(path), path)
        _check_format(run, path, FORMAT)
        at = len(START) + len(UNKNOWN)
        if not text.startswith(START) or text[len(START) : at] != b"%08x" % crc32(START + UNKNOWN.encode() + text[at:]):
            raise CheckpointError(f"{path}: is not what was written")
        files = [header_of(inside(folder, each.name), each[1:]) for each in _files_in(run, folder)]
        sources = [box for tensors, *_ in files for box in tensors.values()]
    _check_run(run, folder)
    try:
        return Content(run, laid_out(sources), f"{crc32(text):08x}")
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _files_in(run: Mapping[str, Any], folder: Path) -> list[Written]:
    try:
        return [Written(*each) for each in run["files"]]
    except (TypeError, KeyError):
        raise CheckpointError(f"{folder}: no complete checkpoint of ndtp.checkpoint.save: no list of files") from None


def _check_format(run: Mapping[str, object], path: Path, known: int) -> None:
    found = run.get("format")
    if type(found) is int and found > known:
        raise CheckpointError(
            f"{path}: is of format {found}, newer than {known}, the one that this version reads\n  fix: a newer ndtp"
        )
    if found != known:
        raise CheckpointError(f"{path}: is not of format {known}, the one that this version reads")


def _check_run(run: Mapping[str, Any], folder: Path) -> None:
    """Check that the values that are no tensors have the form that `save` gives them."""
    groups, values = run.get("groups"), run.get("values")
    try:
        named = groups is None or all(all(type(key) is str for key in group["params"]) for group in groups)
        if not named or "extra" not in run or not all(type(each) is dict for each in values.values()):  # type: ignore[union-attr]
            raise ValueError("groups, values or extra")
        for choices in choices_in(run):
            if choices is not None:
                ChunkChoices().restore(choices)
    except Exception as error:  # whatever foreign JSON makes it
        raise CheckpointError(
            f"{folder}: no complete checkpoint of ndtp.checkpoint.save: {type(error).__name__}: {error}"
        ) from None


def choices_in(run: Mapping[str, object]) -> list[Any]:
    """The numbers of chunks that were kept, by the stage."""
    choices = run.get("chunks", [])
    return choices if isinstance(choices, list) else [choices]


def complete(folder: Path) -> Path:
    """The folder; where a save was interrupted between two renames, the checkpoint of before."""
    before = _beside(folder, "before")
    return before if not folder.exists() and before.exists() else folder


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}.{what}")


class FolderSwap:
    """A folder that is written beside the one that it replaces, by one writer at a time; on the first of its ranks.

    A writer is known by a lock on the folder that it fills, which goes when the writer goes, however that comes about.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))  # where this is a link, beside what it leads to
        self.partial = _beside(self.folder, "partial")
        self._held = ExitStack()

    def open(self) -> None:
        """An empty folder to fill.

        Raises:
            OSError: there is none, or another writer has it.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        held = self._held.enter_context(locked(self.partial))
        if not self.partial.exists() or not os.path.samestat(os.fstat(held), self.partial.lstat()):
            raise BlockingIOError(f"{self.partial}: another process has just saved there")
        self._held.callback(shutil.rmtree, self.partial, ignore_errors=True)  # a disk that was full has room again
        for each in self.partial.iterdir():
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()

    def finish(self, text: bytes, files: Sequence[Written] = ()) -> None:
        """Write the manifest, and put the folder in its place; where a file is missing, the checkpoint before stays."""
        check_written(self.partial, files)
        with (self.partial / MANIFEST).open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync(self.partial)
        before = _beside(self.folder, "before")
        # Who saved it may still be clearing up what was before it, under the name that it gets now.
        with locked(self.folder) if self.folder.exists() else nullcontext():
            if self.folder.exists():
                shutil.rmtree(before, ignore_errors=True)
                self.folder.rename(before)
            try:
                self.partial.rename(self.folder)
            except OSError:
                if before.exists():
                    before.rename(self.folder)
                raise
            sync(self.folder.parent)
            shutil.rmtree(before, ignore_errors=True)

    def close(self) -> None:
        """Let go of it; what is there still was not finished."""
        self._held.close()


def check_written(folder: Path, files: Sequence[Written]) -> None:
    """Check that files are there before they replace others: since a rank wrote its own, somebody may have taken it.

    Raises:
        OSError: a file is gone, or has another size.
    """
    for name, size, _ in files:
        if (there := (folder / name).stat().st_size) != size:
            raise OSError(f"{folder / name} has {there} bytes of {size}")


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Nobody else has the folder meanwhile."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise BlockingIOError(f"{folder}: another process saves there ({error.strerror})") from None
        yield held
    finally:
        os.close(held)


def sync(folder: Path) -> None:
    """Make sure that the names of files in a folder are on the disk."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(held)
    finally:
        os.close(held)
