"""Checkpoints of a training run, in the shapes of the dense model: written on one grid, read on any other, or on none.

Each rank writes its boxes of every dense tensor, of a parameter as of what an optimizer keeps for it, and reads the
boxes that it needs of those that were written.  Which those are follows from the layouts: ranks say nothing to each
other but whether all went well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ndtp.checkpoints import folder as folders
from ndtp.checkpoints.folder import Content, FolderSwap, Written
from ndtp.checkpoints.optimizer_state import Kept, fresh_state, kept_by, names_in, restore_groups, together
from ndtp.checkpoints.parts import Part
from ndtp.checkpoints.pieces import Piece, Staged, Whole, whole_of
from ndtp.checkpoints.safetensors_file import NAMES, write_file
from ndtp.errors import CheckpointError, warn
from ndtp.models.state_entries import replaced, tensors_of
from ndtp.runtime.crew import failure_of
from ndtp.runtime.facts import digest

_UNFINISHED = "has not finished to write"


def save(
    model: nn.Module | Staged | Sequence[Staged],
    optimizer: Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    extra: Mapping[str, object] | None = None,
    chunks: bool = False,
) -> None:
    """Write a model and its optimizer, dense or on any grid, as a folder of safetensors files with a manifest.

    A collective; each rank writes its parts, replicas once.  Tensors have the keys (`model.<key>`) and shapes of the
    dense model, what the optimizer keeps goes by the keys of its parameters (`optimizer.state.<key>.<name>`).  All is
    written to `<folder>.partial` and renamed when it is on the disk: a save that is interrupted leaves the one before.

    Args:
        model: or the stages of a pipeline that this rank has, one or several: all ranks of all stages write the whole
            model, of which a tied weight is written once.
        optimizer: any of torch's; of all parameters of this rank's stages; None: the model alone.
        folder: on a file system that all ranks see.
        extra: what else the program wants back, of numbers, texts, lists and dicts: its step, a scheduler's state.
            That of rank 0 is kept; where ranks have other values, a warning says which.
        chunks: keep what `chunks="auto"` has come to, so that a run that goes on with this on the same grid measures
            nothing, and cuts its products alike.

    Raises:
        CheckpointError: an optimizer of other parameters than the model's, a value that JSON does not have, a parameter
            on the meta device; other ranks, which are no part of this, write to the folder, too.  Before anything is
            written.
        CommunicationError: a rank could not write, or is gone, or another program writes to the folder; on every rank.
            The checkpoint of before stays.
    """
    saving = Saving(model, optimizer, folder, extra, chunks)
    saving.write()
    saving.wait()


def start_save(
    model: nn.Module | Staged | Sequence[Staged],
    optimizer: Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    extra: Mapping[str, object] | None = None,
    chunks: bool = False,
) -> Saving:
    """Start a `save` that runs beside the training.

    This rank's part is copied to the host's memory, and a thread writes it. The checkpoint exists when `wait` of the
    result, a collective, has returned.
    """
    saving = Saving(model, optimizer, folder, extra, chunks)
    saving.start()
    return saving


class Saving:
    """A save that is under way."""

    def __init__(
        self,
        model: nn.Module | Staged | Sequence[Staged],
        optimizer: Optimizer | None,
        folder: str | os.PathLike[str],
        extra: Mapping[str, Any] | None,
        chunks: bool,
    ) -> None:
        self.folder, whole = Path(folder), whole_of(model)
        self.crew = whole.crew
        self._boxes: list[tuple[str, tuple[int, ...], torch.Tensor]] = []
        self._failure, self._written = _UNFINISHED, list[Written]()
        self._thread: Thread | None = None
        whole.meet(f"save: {folder}", one_folder=True)
        every: list[Kept] = []

        def describe() -> None:
            parts = [
                (f"model.{entry.keys[0]}", Part(entry, piece.mesh))
                for piece in whole.pieces
                for entry in piece.entries()
                if entry.keys[0] not in piece.elsewhere
            ]
            every.extend([Kept()] * len(whole.pieces) if optimizer is None else kept_by(optimizer, whole.pieces))
            parts += [part for kept in every for part in kept.parts.items()]
            for turn, (key, part) in enumerate(parts):
                if part.entry.local.is_meta or part.dtype not in NAMES:
                    what = "on the meta device, and has no values" if part.entry.local.is_meta else f"of {part.dtype}"
                    raise CheckpointError(f"save: '{key.removeprefix('model.')}' is {what}")
                if part.is_written_here(turn):
                    self._boxes += [(key, *box) for box in part.boxes()]
            _check_plain("extra", extra)
            for kept in every:
                _check_plain("a group of the optimizer", kept.groups)
                _check_plain(f"the state of {type(optimizer).__name__}", kept.values)
            if failure := self.crew.only_writer(self.folder):
                raise CheckpointError(f"save: {failure}")

        self.crew.agree(failure_of(describe))
        given = f"chunks={chunks}"
        if whole.count == 1:  # stages may have optimizers of their own, or none
            names = sorted(key for kept in every for key in kept.parts)
            given += ", no optimizer" if optimizer is None else f", optimizer {type(optimizer).__name__}"
            given += f" with {len(names)} tensors of state (names {digest(names):x})" * (optimizer is not None)
        fix = "the same arguments of save on every rank: an optimizer of the same weights, with as many steps"
        self.crew.agree_on(given, f"save: {folder}: ranks give", fix)
        self._warn_of_other_extra(extra or {})
        kind = None if optimizer is None else type(optimizer).__name__
        self._run = _run(whole, every, chunks, dict(extra or {})) | {"optimizer": kind}
        self._exchange = FolderSwap(self.folder)
        self.crew.alone(self._exchange.open, f"save: {self.folder} stays as it was")

    def _warn_of_other_extra(self, extra: Mapping[str, object]) -> None:
        """Say which values of `extra` ranks have otherwise: one rank's are written; a collective."""
        plain = json.loads(json.dumps(extra))  # whose keys are texts, and can be sorted
        own = {key: digest(json.dumps(value, sort_keys=True)) for key, value in plain.items()}
        by_rank = self.crew.differing(json.dumps(own, sort_keys=True))
        if by_rank is None or not self.crew.is_first:
            return
        first, *others = (json.loads(text) for text in by_rank.values())
        keys = sorted({key for each in others for key in {*first, *each} if first.get(key) != each.get(key)})
        warn(
            f"ndtp.checkpoint.save: {self.folder}: ranks have other values in extra: {', '.join(map(repr, keys))}; "
            f"those of rank {min(by_rank)} are written, and every rank is given them by load\n"
            "  fix: the same extra on every rank; what each has of its own, in a list of all of them"
        )

    def start(self) -> None:
        self._boxes = [(key, start, box.to("cpu", copy=True)) for key, start, box in self._boxes]
        self._thread = Thread(target=self.write, name="ndtp.checkpoint")
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Return whether this rank has nothing left to write."""
        return self._thread is None or not self._thread.is_alive()

    def write(self) -> None:
        """Write this rank's part, in files of its own; the collectives of others go on meanwhile."""
        self._failure = failure_of(self._write)
        self._boxes = []

    def _write(self) -> None:
        # A file has a box of each tensor, as torch's own reader wants it; a rank may have several boxes of one.
        rounds: list[dict[str, tuple[tuple[int, ...], torch.Tensor]]] = []
        for key, start, box in self._boxes:
            at = next((each for each in rounds if key not in each), None)
            if at is None:
                rounds.append(at := {})
            at[key] = (start, box)
        for i, boxes in enumerate(rounds):
            name = f"rank-{self.crew.rank:05}{f'-{i + 1}' if i else ''}.safetensors"
            facts = write_file(
                self._exchange.partial / name,
                {key: box for key, (_, box) in boxes.items()},
                {key: at for key, (at, _) in boxes.items()},
            )
            self._written.append(Written(name, *facts))

    def wait(self) -> None:
        """Put the checkpoint in its place, when all ranks have written theirs.  A collective.

        Raises:
            CommunicationError: as `save`.
        """
        if self._thread is not None:
            self._thread.join()
        what = f"save: {self.folder} stays as it was"
        try:
            said = self.crew.gather_done(self._failure, self._written, what)
            files = [Written(*each) for written in said for each in written]
            self.crew.alone(lambda: self._exchange.finish(folders.manifest(self._run, files), files), what)
        finally:
            self._exchange.close()


def _check_plain(what: str, value: object) -> None:
    """Refuse a value that a manifest cannot hold.

    Raises:
        CheckpointError: names what has it.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"save: JSON lacks what {what} has: {error}\n  fix: numbers, texts, lists and dicts of these; an optimizer "
            "that keeps lists of tensors, as LBFGS, begins anew: optimizer=None"
        ) from None


def _run(whole: Whole, every: Sequence[Kept], chunks: bool, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all pieces that are no tensors."""

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
    run = {"groups": groups, "values": values, "extra": extra}
    return run if choices is None else run | {"chunks": choices}


def load(
    model: nn.Module | Staged | Sequence[Staged], optimizer: Optimizer | None, folder: str | os.PathLike[str]
) -> dict[str, Any]:
    """Read what `save` wrote, on any grid or in stages, into a model and its optimizer on any other, or on none.

    A collective.  Nothing of what is read is executed; every block of bytes is compared with its checksum.  Everything
    is read into new memory first, a copy of this rank's parameters, so that an error changes nothing.  The settings of
    the optimizer's groups come back, too, but for how it runs (`foreach`, `fused`); and, on the same grid, the numbers
    of chunks that `save` was asked to keep, for products that have not run here yet.

    Args:
        model, optimizer: as for `save`; the stages may be others, and as many or not.

    Returns:
        The `extra` of `save`.

    Raises:
        CheckpointError: no checkpoint, one that is cut short or not what was written, of another model or optimizer;
            names file and key.  The same on every rank, and nothing is changed.
        CommunicationError: a rank is gone.
    """
    whole, folder = whole_of(model), folders.complete(Path(folder))
    crew = whole.crew
    whole.meet(f"load: {folder}")
    content = Content({}, {}, "")
    every: list[Kept] = []
    keys: list[dict[tuple[str, ...], str]] = []

    def look() -> None:
        nonlocal content
        content = folders.read(folder)
        keys.extend(_keys(piece, whole, content, folder) for piece in whole.pieces)
        if optimizer is not None:
            every.extend(fresh_state(optimizer, whole, content.tensors, content.run, folder))

    frame = "load: {}; nothing was changed"
    crew.agree(failure_of(look), frame)
    if crew.differing(content.signature) is not None:
        raise CheckpointError(f"load: {folder}: ranks find different checkpoints there; nothing was changed")
    fresh = {id(x): torch.zeros_like(x) for piece in whole.pieces for x in tensors_of(piece.module)}
    wanted: list[tuple[str, Part]] = []
    for i, piece in enumerate(whole.pieces):
        with replaced(piece.module, fresh):
            wanted += [(keys[i][entry.keys], Part(entry, piece.mesh)) for entry in piece.entries()]
        if optimizer is not None:
            wanted += every[i].parts.items()
    crew.agree(failure_of(partial(_fill, wanted, content)), frame)
    with torch.no_grad():
        for piece in whole.pieces:
            for x in tensors_of(piece.module):
                x.copy_(fresh[id(x)])
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update({key: state for kept in every for key, state in kept.states.items()})
        restore_groups(optimizer, names_in(every), content.run["groups"])
    _restore_chunks(whole, content)
    return content.run["extra"]


def _fill(wanted: Sequence[tuple[str, Part]], content: Content) -> None:
    with torch.no_grad():
        for key, part in wanted:
            content.tensors[key].fill(key, part)


def _restore_chunks(whole: Whole, content: Content) -> None:
    """Give grids that are those of the checkpoint the numbers of chunks that were kept."""
    choices = folders.choices_in(content.run)
    for piece in whole.pieces:
        kept_ones = choices[piece.index] if len(choices) == whole.count else None
        if piece.mesh is not None and kept_ones and kept_ones.get("grid") == str(piece.mesh.grid):
            piece.mesh.step.chunks.restore(kept_ones)


def _keys(piece: Piece, whole: Whole, content: Content, folder: Path) -> dict[tuple[str, ...], str]:
    """Keys of a tensor -> that under which the checkpoint has it; that the two have the same tensors."""
    stored = {key.removeprefix("model."): x for key, x in content.tensors.items() if key.startswith("model.")}
    keys: dict[tuple[str, ...], str] = {}
    for entry in piece.entries():
        key = next((key for key in entry.keys if key in stored), None)
        if key is None:
            raise CheckpointError(f"{folder}: '{entry.keys[0]}', a key of the model, is not in it")
        there = stored[key]
        if there.shape != entry.dense:
            raise CheckpointError(f"{folder}: '{key}' has the shape {there.shape}, that of the model {entry.dense}")
        if there.dtype.is_floating_point != entry.local.dtype.is_floating_point:
            raise CheckpointError(f"{folder}: '{key}' is {there.dtype}, that of the model {entry.local.dtype}")
        keys[entry.keys] = f"model.{key}"
    known = {key for group in whole.keys for key in group}
    foreign = [key for key in stored if key not in known]
    if foreign:
        more = f", nor are {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise CheckpointError(f"{folder}: '{foreign[0]}' is no key of the model{more}")
    return keys
