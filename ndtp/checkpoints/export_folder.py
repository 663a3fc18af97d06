"""The folder that gets the files of a dense model: it has all of them when an export ends well, or is as it was.

.ndtp-partial/                                  what an export has written so far, made anew by each
model-1a2b3c4d-00001-of-00002.safetensors       a file of several, whose names no earlier export has
model.safetensors.index.json                    the file that says which of them count, replaced last
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ndtp.checkpoints.folder import Written, check_written, locked, sync
from ndtp.checkpoints.guarded import parsed, read_all
from ndtp.checkpoints.safetensors_file import INDEX, is_of_writer
from ndtp.errors import CheckpointError

PARTIAL = ".ndtp-partial"
ONLY, OWN_INDEX = "model.safetensors", f"model{INDEX}"  # what readers look for
_NUMBERED = re.compile(r"model(-[0-9a-f]{8})?-\d{5,}-of-\d{5,}\.safetensors")


class ExportFolder:
    """A folder whose files are replaced together, by one export at a time; on the first of its ranks.

    Attributes:
        partial: where files are written, by all ranks that write some, before they get their names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))  # where this is a link, the one that it leads to
        self.partial = self.folder / PARTIAL
        self._held = ExitStack()

    def open(self, model: object, dtype: torch.dtype | None) -> None:
        """Lock the folder, clear up behind an export that was killed, and write the configs beside.

        Args:
            model: its configs, if it has any, say which model it is.
            dtype: of the weights, which the config names.

        Raises:
            OSError: nothing can be written there, or another export has the folder.
            Exception: whatever a config raises that is not to be saved.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(locked(self.folder))
        if os.path.lexists(self.partial):
            shutil.rmtree(self.partial)
        if named := _named_in(self.folder):
            self._remove_unnamed(named)
        self.partial.mkdir()
        self._held.callback(shutil.rmtree, self.partial, ignore_errors=True)
        for name in ("config", "generation_config"):
            config: Any = getattr(model, name, None)
            if hasattr(config, "save_pretrained"):
                config = copy.copy(config)
                if name == "config":
                    config.architectures = getattr(config, "architectures", None) or [type(model).__name__]
                    config.dtype = dtype if dtype is not None else getattr(config, "dtype", None)
                config.save_pretrained(self.partial)

    def finish(self, files: Sequence[tuple[Written, Mapping[str, int]]]) -> None:
        """Give the files their names, last the one that readers look for, and remove those of an earlier export.

        Args:
            files: in their order, each with what it has, key -> bytes.

        Raises:
            OSError: a file is not there any more, or the folder cannot be changed; the earlier files are as they were.
        """
        check_written(self.partial, [written for written, _ in files])
        before = _files_of(self.folder / OWN_INDEX)
        names = self._names(len(files))
        last, sizes = ONLY, dict(zip(names, (part for _, part in files), strict=True))
        if len(names) > 1:
            last = OWN_INDEX
            total = sum(sum(part.values()) for part in sizes.values())
            places = {key: name for name, part in sizes.items() for key in part}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
            (self.partial / last).write_text(text)
        moves = {written.name: name for (written, _), name in zip(files, names, strict=True)}
        for path in sorted(self.partial.iterdir()):
            if path.name not in moves:
                moves[path.name] = path.name
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        with ExitStack() as undone:
            for source, name in sorted(moves.items(), key=lambda move: move[1] == last):
                if name == last:
                    sync(self.folder)
                elif name in names:
                    undone.callback((self.folder / name).unlink, missing_ok=True)
                os.replace(self.partial / source, self.folder / name)
            undone.pop_all()
        self._remove_earlier(before, names)
        sync(self.folder)

    def _names(self, count: int) -> list[str]:
        """The names of new files; those of several are not taken yet, since what an index names stays until then."""
        if count == 1:
            return [ONLY]
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if any((self.folder / name).exists() for name in (OWN_INDEX, *names)):
            token = secrets.token_hex(4)
            names = [name.replace("model-", f"model-{token}-", 1) for name in names]
        return names

    def _remove_earlier(self, before: set[str], names: Sequence[str]) -> None:
        if len(names) == 1:
            (self.folder / OWN_INDEX).unlink(missing_ok=True)
        named = _named_in(self.folder)
        gone = before | ({ONLY} if len(names) > 1 else set())
        for name in gone - set(names) - (named or set()):
            (self.folder / name).unlink(missing_ok=True)
        if named is not None:
            self._remove_unnamed(named | set(names))

    def _remove_unnamed(self, named: set[str]) -> None:
        """Remove files of an export that was killed: by their names and contents ndtp's, and no index has them."""
        for path in list(self.folder.iterdir()):
            if _NUMBERED.fullmatch(path.name) and path.name not in named and is_of_writer(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder; what is still partial goes."""
        self._held.close()


def _named_in(folder: Path) -> set[str] | None:
    """The files that the indices of a folder name; None where one of them cannot be read."""
    named: set[str] = set()
    try:
        for index in folder.glob(f"*{INDEX}"):
            named.update(map(str, parsed(read_all(index), index)["weight_map"].values()))
    except (CheckpointError, KeyError, AttributeError):
        return None
    return named


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
