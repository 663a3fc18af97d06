"""`save_pretrained`: the folder of a model that transformers, vLLM and others load, from a model on any grid.

Transformers holds some weights otherwise than files have them: all experts of a layer in one tensor, gate and up in
one.  Files are to have what the model's authors published, which other programs read, so each layer goes through
transformers' own conversion, one layer at a time: rank 0 never has more of the model than a file and a layer.
"""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.checkpoints.dense_files import FILE_BYTES, export_safetensors, finish_folder, unwritable
from ndtp.checkpoints.folder import locked
from ndtp.checkpoints.pieces import Staged, Whole, whole_of
from ndtp.checkpoints.safetensors_file import BLOCK_BYTES, INDEX, Writer
from ndtp.models.placing import stock_model
from ndtp.models.saving import blocks
from ndtp.models.state_entries import Entry
from ndtp.runtime.crew import Crew
from ndtp.runtime.process_grid import ProcessGrid

LAYER = re.compile(r"(.*?\.\d+)\.")  # the part of a key that names a layer
SAMPLE = "The quick brown fox, 123 times.\n"  # by which two tokenizers are told apart
TOPIC = "save_pretrained: {}"
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
    failure = ""
    if crew.is_first and tokenizer is not None:
        try:
            _save_tokenizer(tokenizer, folder)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    crew.raise_everywhere(failure, f"save_pretrained: the tokenizer is not in {folder}")


def _save_layers(whole: Whole, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    (piece,), crew = whole.pieces, whole.crew
    model: Any = piece.module
    whole.meet(TOPIC.format(folder))
    crew.agree("; ".join(filter(None, (unwritable(piece), crew.only_writer(folder)))), TOPIC)
    convert = _published(model)
    named = _named(model, piece.entries())
    groups = _groups(named, convert, crew)
    failure, files = "", None
    with ExitStack() as held:
        if crew.is_first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(folder))
                files = _Files(folder, file_bytes)
            except OSError as error:
                failure = str(error)
        for group in groups:
            state = {key: _gathered(entry, piece.mesh, keeps=files is not None) for key, entry in group.items()}
            if files is not None and not failure:
                try:
                    files.add(convert({key: _as(x, dtype) for key, x in state.items() if x is not None}))
                except (OSError, RuntimeError, ValueError) as error:
                    failure = f"{type(error).__name__}: {error}"
        if files is not None and not failure:
            try:
                finish_folder(model, folder, files.finish(), dtype or getattr(model, "dtype", None))
            except OSError as error:
                failure = str(error)
        if files is not None:
            files.discard()
        crew.raise_everywhere(failure, f"save_pretrained: {folder} is not complete")


class _Files:
    """Safetensors files that fill up one by one; they get their names when there are no more to come."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self.folder, self.file_bytes = folder, file_bytes
        # Files that an index names stay as they are until another index is in its place.
        self.token = f"-{secrets.token_hex(4)}" * (folder / f"model{INDEX}").exists()
        self.waiting: State = {}
        self.written: list[tuple[Path, dict[str, int]]] = []

    def add(self, state: Mapping[str, Tensor]) -> None:
        if self.waiting and sum(map(_size, (*self.waiting.values(), *state.values()))) > self.file_bytes:
            self._write()
        self.waiting |= state

    def _write(self) -> None:
        path = self.folder / f"model-{len(self.written) + 1:05}.safetensors.waiting"
        writer, complete = Writer(path, {key: (x.dtype, x.shape) for key, x in self.waiting.items()}), False
        try:
            for key, x in self.waiting.items():
                writer.write(key, 0, x)
            complete = True
        finally:
            writer.close(complete)
        self.written.append((path, {key: _size(x) for key, x in self.waiting.items()}))
        self.waiting = {}

    def finish(self) -> dict[str, dict[str, int]]:
        """Return what each file has, by its final name."""
        self._write()
        count, found = len(self.written), {}
        for number, (path, sizes) in enumerate(self.written, 1):
            name = "model.safetensors" if count == 1 else f"model{self.token}-{number:05}-of-{count:05}.safetensors"
            os.replace(path, self.folder / name)
            found[name] = sizes
        return found

    def discard(self) -> None:
        for path, _ in self.written:
            path.unlink(missing_ok=True)


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
        except (RuntimeError, ValueError, NotImplementedError, KeyError):
            pass  # of what meta tensors do not do
    said = crew.gather(one_by_one)
    return list(layers.values()) if said[min(said)] else [dict(named)]


@torch.no_grad()
def _gathered(entry: Entry, mesh: ProcessGrid | None, keeps: bool) -> Tensor | None:
    """Gather a tensor in the host's memory, on the rank that keeps it; a collective."""
    whole = torch.empty(entry.real, dtype=entry.local.dtype) if keeps else None
    for row, values in blocks(entry, mesh, BLOCK_BYTES):
        if whole is not None:
            (whole[row : row + values.shape[0]] if whole.dim() else whole).copy_(values)
    return None if whole is None else whole.view(entry.dense)


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files, and warn where transformers will read them as those of another class."""
    from transformers import AutoTokenizer

    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    tokenizer.save_pretrained(folder)
    if not hasattr(tokenizer, "tokenize"):
        return  # a processor
    found = AutoTokenizer.from_pretrained(folder)
    if found.tokenize(SAMPLE) != tokenizer.tokenize(SAMPLE):
        warnings.warn(
            f"save_pretrained: AutoTokenizer takes a {type(found).__name__} for models of this type, which splits text "
            f"otherwise than the {type(tokenizer).__name__} given\n  fix: load the tokenizer of {folder} as "
            f"transformers.{type(tokenizer).__name__}, or use a tokenizer of the model's own class",
            stacklevel=3,
        )
