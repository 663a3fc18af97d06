"""`save_pretrained`: the folder of a model that transformers, vLLM and others load, from a model on any grid.

Transformers holds some weights otherwise than files have them: all experts of a layer in one tensor, gate and up in
one.  Files are to have what the model's authors published, which other programs read, so each layer goes through
transformers' own conversion, one layer at a time: rank 0 never has more of the model than a file and a layer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.checkpoints.dense_files import FILE_BYTES, UNFINISHED, check_writable, export_safetensors
from ndtp.checkpoints.export_folder import ExportFolder
from ndtp.checkpoints.folder import Written
from ndtp.checkpoints.pieces import Staged, Whole, whole_of
from ndtp.checkpoints.safetensors_file import BLOCK_BYTES, write_file
from ndtp.errors import warn
from ndtp.models.placing import stock_model
from ndtp.models.saving import blocks
from ndtp.models.state_entries import Entry
from ndtp.runtime.crew import Crew, failure_of
from ndtp.runtime.process_grid import ProcessGrid

LAYER = re.compile(r"(.*?\.\d+)\.")  # the part of a key that names a layer
SAMPLE = "The quick brown fox, 123 times.\n"  # by which two tokenizers are told apart
State = dict[str, Tensor]


def save_pretrained(
    model: nn.Module | Staged | Sequence[Staged],
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the folder from which transformers' `from_pretrained`, vLLM and others load a model.

    A collective.  It has `config.json`, `generation_config.json`, safetensors files with their index, and the
    tokenizer's files.  Keys and shapes are those that the model's authors published, also where transformers holds
    weights otherwise (all experts of a layer in one tensor).  Rank 0 gathers layer by layer, and never has more of the
    model in memory than one file and one layer.

    Args:
        model: one of transformers, dense or on any grid.  Other modules, and stages of a pipeline, are written by
            `ndtp.checkpoint.export_safetensors`; of a model with adapters of peft, the adapters are.
        tokenizer: one of transformers, or a processor, or a folder whose tokenizer is copied.
        dtype: of floating-point weights; default: as they are.
        file_bytes: of one file, as far as one layer is no larger.

    Raises:
        CheckpointError: a parameter on the meta device, or other ranks that write to the folder.
        CommunicationError: rank 0 could not write; on every rank.
    """
    folder = Path(folder)
    if not isinstance(model, nn.Module) or stock_model(model) is None:
        export_safetensors(model, folder, file_bytes=file_bytes)
        crew = whole_of(model).crew
    elif hasattr(model, "peft_config"):
        model.save_pretrained(folder)  # type: ignore[operator]
        crew = whole_of(model).crew
    else:
        whole = whole_of(model)
        crew = whole.crew
        _save_layers(whole, folder, dtype, file_bytes)
    advice = crew.alone(
        lambda: "" if tokenizer is None else _save_tokenizer(tokenizer, folder),
        f"save_pretrained: the tokenizer is not in {folder}",
    )
    if advice:
        warn(advice)


def _save_layers(whole: Whole, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    (piece,), crew = whole.pieces, whole.crew
    model = piece.module
    whole.meet(f"save_pretrained: {folder}", one_folder=True)
    crew.agree(failure_of(lambda: check_writable(whole, folder)), "save_pretrained: {}")
    before = f"save_pretrained: {folder} stays as it was"
    with closing(ExportFolder(folder)) as target:
        crew.alone(lambda: target.open(model, dtype or getattr(model, "dtype", None)), before)
        convert = _published(model)
        failure, files = "", _Files(target.partial, file_bytes)
        for group in _groups(_named(model, piece.entries()), convert, crew):
            state: State | None = {} if crew.is_first else None
            for key, entry in group.items():
                failure = _gather(key, entry, piece.mesh, state, failure)
            if state is not None and not failure:
                failure = failure_of(partial(_add, files, convert, state, dtype))
        crew.raise_everywhere(failure, before)
        written = crew.alone(files.finish, before)
        crew.alone(lambda: target.finish(written or []), UNFINISHED.format(before))


class _Files:
    """Safetensors files that fill up one by one."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self.folder, self.file_bytes = folder, file_bytes
        self.waiting: State = {}
        self.written: list[tuple[Written, dict[str, int]]] = []

    def add(self, state: Mapping[str, Tensor]) -> None:
        if self.waiting and sum(map(_size, (*self.waiting.values(), *state.values()))) > self.file_bytes:
            self._write()
        self.waiting |= state

    def _write(self) -> None:
        path = self.folder / f"{len(self.written) + 1:05}.safetensors"
        facts = write_file(path, self.waiting)
        self.written.append((Written(path.name, *facts), {key: _size(x) for key, x in self.waiting.items()}))
        self.waiting = {}

    def finish(self) -> list[tuple[Written, dict[str, int]]]:
        """Return what each file has."""
        self._write()
        return self.written


def _add(files: _Files, convert: Callable[[State], State], state: State, dtype: torch.dtype | None) -> None:
    files.add(convert({key: _as(x, dtype) for key, x in state.items()}))


def _named(model: Any, entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return the entries that are written, each by the one of its names that transformers keeps."""
    tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    named = {next((key for key in entry.keys if key not in tied), entry.keys[0]): entry for entry in entries}
    return {key: entry for key, entry in named.items() if key not in unsaved}


def _published(model: Any) -> Callable[[State], State]:
    """Return transformers' conversion of a model's weights to those of published files."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # of a transformers that holds weights as files have them
        return dict
    return lambda state: revert_weight_conversion(model, state)


def _groups(named: Mapping[str, Entry], convert: Callable[[State], State], crew: Crew) -> list[dict[str, Entry]]:
    """Return the entries layer by layer; all at once where a conversion mixes layers."""
    layers: dict[str, dict[str, Entry]] = {}
    for key, entry in named.items():
        found = LAYER.match(key)
        layers.setdefault(found[1] if found else "", {})[key] = entry
    one_by_one = False
    if crew.is_first:
        forms = {key: torch.empty(entry.dense, dtype=entry.local.dtype, device="meta") for key, entry in named.items()}
        try:
            at_once = {key: x.shape for key, x in convert(forms).items()}
            parts = [convert({key: forms[key] for key in layer}) for layer in layers.values()]
            one_by_one = {key: x.shape for part in parts for key, x in part.items()} == at_once
        except Exception:
            pass  # of what meta tensors do not do, or of what fails again where the values are there
    said = crew.gather(one_by_one)
    return list(layers.values()) if said[min(said)] else [dict(named)]


@torch.no_grad()
def _gather(key: str, entry: Entry, mesh: ProcessGrid | None, state: State | None, failure: str) -> str:
    """Gather a tensor in the host's memory, on the rank that has a state, unless it has failed; a collective.

    Returns its failure.
    """

    def make() -> None:
        if state is not None:
            state[key] = torch.empty(entry.real, dtype=entry.local.dtype, device="cpu")

    def put(whole: Tensor, row: int, values: Tensor) -> None:
        (whole[row : row + values.shape[0]] if whole.dim() else whole).copy_(values)

    failure = failure or failure_of(make)
    for row, values in blocks(entry, mesh, BLOCK_BYTES):
        if state is not None and not failure:
            failure = failure_of(partial(put, state[key], row, values))
    if state is not None and not failure:
        state[key] = state[key].view(entry.dense)
    return failure


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _save_tokenizer(tokenizer: Any, folder: Path) -> str:
    """Write a tokenizer's files.  Returns a warning where transformers will read them as those of another class."""
    from transformers import AutoTokenizer

    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    tokenizer.save_pretrained(folder)
    if not hasattr(tokenizer, "tokenize"):
        return ""  # a processor
    found = AutoTokenizer.from_pretrained(folder)
    if found.tokenize(SAMPLE) == tokenizer.tokenize(SAMPLE):
        return ""
    return (
        f"save_pretrained: AutoTokenizer takes a {type(found).__name__} for models of this type, which splits text "
        f"otherwise than the {type(tokenizer).__name__} given\n  fix: load the tokenizer of {folder} as "
        f"transformers.{type(tokenizer).__name__}, or use a tokenizer of the model's own class"
    )
