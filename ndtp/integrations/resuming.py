"""The checkpoint that a run of transformers or accelerate goes on from, as all ranks find it before one of them reads.

These libraries look for files on each rank, and go on without what they do not find: a fresh optimizer, say.  They
write one file after the other, so that a run that is killed in a save leaves a part of a checkpoint.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from ndtp.checkpoints.folder import complete
from ndtp.checkpoints.safetensors_file import header_of
from ndtp.errors import CheckpointError, warn
from ndtp.runtime.crew import Crew

STATE, SCHEDULER = "ndtp", "scheduler.pt"  # of a folder of a Trainer's
LAST = "trainer_state.json"  # which a save writes last
READ = (".json", ".safetensors", ".pt", ".pth", ".bin", ".index")
Found: TypeAlias = Mapping[str, str]


def checkpoint_of(crew: Crew, given: object, output: str | os.PathLike[str]) -> str:
    """Return the checkpoint that `resume_from_checkpoint` means; a collective.

    Args:
        given: True: the last one in `output` that is whole; or its path.

    Raises:
        CheckpointError: none that is whole, or another one on some ranks; the same on every rank.
    """
    broken: list[str] = []
    if given is True:
        path = _last_whole(Path(output), broken)
        fault = "" if path else _none_in(Path(output), broken)
    else:
        path = Path(os.fspath(given))  # type: ignore[call-overload]
        fault = _fault_of(path)
    chosen = {"the checkpoint": path.name} if path else {}
    _agree(crew, path or Path(output), fault, chosen, "resume_from_checkpoint")
    if broken and crew.is_first:
        warn(f"Trainer: {broken[0]}; the run goes on from {path}")
    return str(path)


def same_files(crew: Crew, folder: str | os.PathLike[str], what: str) -> None:
    """See that all ranks find the same files in a folder; a collective.

    Raises:
        CheckpointError: names a file that one of them lacks, or that has another size there; on every rank.
    """
    _agree(crew, Path(folder), "", {}, what)


def _agree(crew: Crew, path: Path, fault: str, chosen: Found, what: str) -> None:
    said = sorted(crew.gather([str(path.absolute()), fault, {**chosen, **_files_in(path)}]).items())
    for rank, (_, text, _) in said:
        if text:
            alike = all(each[1] == text for _, each in said)
            raise CheckpointError(f"{what}: {text}" if alike else f"{what}: on rank {rank} {text}")
    (first, (folder, _, files)), *others = said
    for rank, (_, _, there) in others:
        name = min((key for key in {*files, *there} if files.get(key) != there.get(key)), default=None)
        if name is not None:
            raise CheckpointError(
                f"{what}: ranks find different things in {folder}: {name} is {files.get(name, 'not there')} on rank "
                f"{first}, and {there.get(name, 'not there')} on rank {rank}\n"
                "  fix: one folder, on a file system that all ranks see"
            )


def _last_whole(output: Path, broken: list[str]) -> Path | None:
    """Return the last checkpoint of a run that is whole, and note those behind it that are not."""
    steps = (path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*") if path.is_dir())
    for step in sorted((step for step in steps if step.isdecimal()), key=int, reverse=True):
        path = output / f"checkpoint-{step}"
        if not (fault := _fault_of(path)):
            return path
        broken.append(fault.splitlines()[0])
    return None


def _none_in(output: Path, broken: Sequence[str]) -> str:
    of_each = "".join(f"\n  {fault}" for fault in broken)
    return f"no whole checkpoint in {output}{of_each}\n  fix: begin anew, or name a checkpoint of another folder"


def _fault_of(path: Path) -> str:
    """Return what keeps a run from going on from a checkpoint of a Trainer's, or ""."""
    if not path.is_dir():
        return f"{path} is no folder\n  fix: one that a Trainer has written, such as {path.parent}/checkpoint-500"
    if not (path / LAST).is_file():
        return f"{path} has no {LAST}, which a save writes last: it was interrupted"
    for file in sorted(path.iterdir()):
        if fault := _fault_of_file(file):
            return fault
    kept = complete(path / STATE).is_dir() or (path / "optimizer.pt").is_file() or (path / "optimizer.bin").is_file()
    if not kept or not (path / SCHEDULER).is_file():
        lacks = f"no {SCHEDULER}" if kept else "no state of an optimizer"
        return (
            f"{path} has {lacks}, as save_only_model=True leaves out, without which a run would begin with a new one\n"
            "  fix: train() without resume_from_checkpoint, of a model that from_pretrained reads from there"
        )
    return ""


def _fault_of_file(file: Path) -> str:
    """Return what is wrong with a file that a rank is about to read, or ""."""
    if file.name == LAST:
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return f"{file} is cut short"
    if file.suffix in (".pt", ".pth"):
        return "" if zipfile.is_zipfile(file) else f"{file} is cut short, or was not written by torch.save"
    if file.suffix == ".safetensors":
        try:
            header_of(file)
        except CheckpointError as error:
            return str(error)
    return ""


def _files_in(folder: Path) -> dict[str, str]:
    """Return the files of a folder that are read from there, with their sizes, and the folders."""
    if not folder.is_dir():
        return {str(folder.name): "no folder"}
    found = sorted(folder.iterdir())
    files = {path.name: f"of {path.stat().st_size:,} bytes" for path in found if path.suffix in READ}
    return files | {path.name: "a folder" for path in found if path.is_dir()}
