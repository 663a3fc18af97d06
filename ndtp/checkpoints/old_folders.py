"""Folders that ndtp wrote before format 2, by torch's distributed checkpoints (DCP): their metadata is a pickle.

A pickle is a program.  Here it can make numbers, texts, lists, dicts and records of names that are on a list, and
nothing else: no class or function of torch is called, none is changed, and what it says is checked like any other file.
The tensors are read by `torch.load(weights_only=True)`, after a look at the sizes that their archives claim.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtp.checkpoints.guarded import inside, opened, read_all, sizes
from ndtp.errors import CheckpointError

METADATA = ".metadata"
MOST_OPERATIONS = 5_000_000
OPERATIONS = {
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD",
}  # fmt: skip
_META = "torch.distributed.checkpoint.metadata"
RECORDS = {
    *((_META, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_META, name) for name in ("BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(("torch", name) for name in ("Size", "device")),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}


class Record:
    """A record in place of an object of a class on the list: its arguments, and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the items of an ordered dict, which say nothing that is read here."""


def _member(kind: object, name: object) -> Record:
    """Return a record of a member of an enumeration; nothing is looked up."""
    return Record(name)


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return _member  # of an enumeration, as Python 3.11.0 to 3.11.3 pickles it
        if (module, name) not in RECORDS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        # A class of this pickle's own: what the pickle does to it goes with it.
        return self._classes.setdefault(name, type(name, (Record,), {}))


def unpickled(data: bytes) -> Any:
    """Return the metadata as records.

    Raises:
        UnpicklingError, ValueError and others: it is no such pickle.
    """
    for count, (operation, argument, _) in enumerate(pickletools.genops(data), 1):
        if operation.name not in OPERATIONS or count > MOST_OPERATIONS:
            raise pickle.UnpicklingError(f"operation {count} is {operation.name}, which no checkpoint needs")
        if operation.name.endswith("PUT") and int(argument or 0) > count:  # memory is taken for as many as it says
            raise pickle.UnpicklingError(f"operation {count} keeps number {argument}")
    return _Reader(io.BytesIO(data)).load()


class Saved(NamedTuple):
    """A box of a tensor in an archive of `torch.save`, which is a part of a file."""

    key: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    start: int
    length: int

    def read(self, part: Sequence[slice], into: Tensor | None) -> None:
        with opened(self.path) as file:
            file.seek(self.start)
            data = io.BytesIO(file.read(self.length))
        try:
            with zipfile.ZipFile(data) as archive:
                if sum(each.file_size for each in archive.infolist()) > self.length or archive.testzip() is not None:
                    raise ValueError("an archive that is not what was written")
            data.seek(0)
            found = torch.load(data, map_location="cpu", weights_only=True)
            if not isinstance(found, Tensor) or found.dtype != self.dtype or tuple(found.shape) != self.shape:
                raise ValueError("another tensor than the metadata say")
        except Exception as error:  # what a foreign archive makes zipfile and torch raise
            raise CheckpointError(f"{self.path}: '{self.key}': {type(error).__name__}: {error}") from None
        if into is not None:
            into.copy_(found[tuple(part)])


def boxes_in(folder: Path) -> list[Saved]:
    """Return the contents of a DCP folder, box by box.

    Raises:
        CheckpointError: metadata that are no such pickle, or do not fit the files; names the key.
    """
    path = folder / METADATA
    try:
        return _boxes(folder, path, _state(unpickled(read_all(path)), "Metadata"))
    except CheckpointError:
        raise
    except Exception as error:  # a pickle raises whatever a foreign file makes it
        raise CheckpointError(f"{path}: no metadata of a checkpoint: {type(error).__name__}: {error}") from None


def _boxes(folder: Path, path: Path, metadata: dict[str, Any]) -> list[Saved]:
    places = {}
    for index, info in metadata["storage_data"].items():
        at, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if where.get("transform_descriptors"):
            raise CheckpointError(f"{path}: '{at['fqn']}' is compressed, which ndtp never wrote")
        places[at["fqn"], None if at.get("offset") is None else _size(at["offset"], path, at["fqn"])] = where
    found, lengths = [], {}
    for key, laid in metadata["state_dict_metadata"].items():
        state = _state(laid, "TensorStorageMetadata")
        dtype, whole = _state(state["properties"], "TensorProperties")[0], _size(state["size"], path, key)
        if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{path}: {key!r:.100} is no tensor of a dtype")
        for chunk in state["chunks"]:
            box = _state(chunk, "ChunkStorageMetadata")
            offset, shape = (_size(box[name], path, key) for name in ("offsets", "sizes"))
            where = places.get((key, offset)) or places[key, None]
            name, (start, length) = where["relative_path"], sizes([where["offset"], where["length"]], path, key)
            file = inside(folder, name)
            if file not in lengths:
                lengths[file] = file.stat().st_size if file.is_file() else 0
            if lengths[file] < start + length:
                raise CheckpointError(f"{folder}: '{key}' ends in {name} behind its {lengths[file]:,} bytes: cut short")
            if math.prod(shape) * dtype.itemsize > length or len(shape) != len(whole):
                raise CheckpointError(f"{path}: '{key}' {shape} is larger than its {length:,} bytes")
            found.append(Saved(key, file, dtype, shape, offset, start, length))
    return found


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, Record) or type(record).__name__ != name:
        raise ValueError(f"{type(record).__name__} in the place of {name}")
    return record.state


def _size(record: object, path: Path, key: object) -> tuple[int, ...]:
    if not isinstance(record, Record) or type(record).__name__ != "Size" or len(record.args) != 1:
        raise ValueError(f"{type(record).__name__} in the place of torch.Size")
    return sizes(record.args[0], path, f"{key!r:.100}")
