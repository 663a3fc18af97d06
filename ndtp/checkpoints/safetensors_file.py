"""Files of the safetensors format, read and written block by block of rows.

A file is the length of its header (8 bytes, little endian), the header, a JSON object of `{key: {dtype, shape,
data_offsets}}`, and the tensors' bytes, row major.  The format's own library maps a file, or takes all tensors at once;
here no more than one block of rows is in memory, and what is wrong with a file is known before a tensor is touched.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ndtp.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_BYTES = 1 << 22
LONGEST_HEADER = 100_000_000  # that of the format's own library
INDEX = ".safetensors.index.json"


class Stored(NamedTuple):
    """One tensor of a file, and where its bytes begin."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def __str__(self) -> str:
        return f"{self.shape} {NAMES[self.dtype]}"


def tensors_in(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """What a folder, a file or the index of several files holds, by key; headers alone are read.

    Raises:
        CheckpointError: nothing is there, a file is cut short or no safetensors file, a key that the index names is not
            in its file.  Names the file, and the key where there is one.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    if not path.name.endswith(".json"):
        return _header(path)
    try:
        places = json.loads(path.read_text())["weight_map"]
        files = {key: str(name) for key, name in places.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: no index of safetensors files ({type(error).__name__})") from None
    headers: dict[str, dict[str, Stored]] = {}
    found = {}
    for key, name in files.items():
        if name not in headers:
            if not (path.parent / name).is_file():
                raise CheckpointError(f"{path}: '{key}' is in {name}, which is not there")
            headers[name] = _header(path.parent / name)
        if key not in headers[name]:
            raise CheckpointError(f"{path}: '{key}' is said to be in {name}, which has no such key")
        found[key] = headers[name][key]
    return found


def _in_folder(folder: Path) -> Path:
    names = sorted(each.name for each in folder.iterdir())
    for ending in (INDEX, ".safetensors"):
        fitting = [name for name in names if name.endswith(ending)]
        chosen = [name for name in fitting if name == f"model{ending}"] or fitting
        if len(chosen) == 1:
            return folder / chosen[0]
        if chosen:
            raise CheckpointError(f"{folder}: {', '.join(chosen)}: which of them?\n  fix: name the file")
    raise CheckpointError(f"{folder}: there is no safetensors file in it")


def _header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            raise CheckpointError(f"{path}: no safetensors file, or cut short: {size} bytes, a header of {length}")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            parsed = {key: _entry(path, 8 + length, value) for key, value in entries.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path}: its header is none of a safetensors file ({type(error).__name__})"
            ) from None
    for key, stored in parsed.items():
        end = stored.start + math.prod(stored.shape) * stored.dtype.itemsize
        if end > size:
            raise CheckpointError(f"{path}: cut short: '{key}' {stored} ends at byte {end}, the file at {size}")
    return parsed


def _entry(path: Path, base: int, value: Mapping[str, Any]) -> Stored:
    name, shape = value["dtype"], tuple(int(n) for n in value["shape"])
    start, end = (int(n) for n in value["data_offsets"])
    if name not in DTYPES:
        raise CheckpointError(f"{path}: of the dtype {name}, which torch or ndtp does not have")
    if start < 0 or min(shape, default=0) < 0 or end - start != math.prod(shape) * DTYPES[name].itemsize:
        raise ValueError
    return Stored(path, DTYPES[name], shape, base + start)


def read_part(stored: Stored, part: Sequence[slice], into: Tensor, block_bytes: int = BLOCK_BYTES) -> None:
    """Copy `part` of a stored tensor into `into`, of its shape, through one block of whole rows at a time.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    shape = stored.shape or (1,)
    rows, rest = (tuple(part) or (slice(0, 1),))[0], tuple(part)[1:]
    into = into if stored.shape else into.view(1)
    row_bytes = math.prod(shape[1:]) * stored.dtype.itemsize
    if into.numel() == 0:
        return
    step = min(max(block_bytes // row_bytes, 1), rows.stop - rows.start)
    memory = torch.empty(step * row_bytes, dtype=torch.uint8)
    here = (slice(None), *rest)
    with stored.path.open("rb", buffering=0) as file:
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            block = memory[: (last - first) * row_bytes]
            _fill(file, stored.start + first * row_bytes, block)
            values = block.view(stored.dtype).view(last - first, *shape[1:])
            into[first - rows.start : last - rows.start].copy_(values[here])


def _fill(file: Any, start: int, block: Tensor) -> None:
    view: Any = memoryview(block.numpy())  # type: ignore[arg-type]
    file.seek(start)
    while view.nbytes:
        count = file.readinto(view)
        if not count:
            raise OSError(f"{file.name} ends at byte {file.tell()}")
        view = view[count:]


class Writer:
    """A file whose tensors are written in any order, in blocks of rows; it has its name when it is complete."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> None:
        # Of this process: where several meshes have the same model, each writes all of it, and the last one stays.
        self.path, self._partial = path, path.with_name(f"{path.name}.{os.getpid()}.partial")
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        for key, (dtype, shape) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            entries[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self._starts[key] = end
            end += size
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        self._base = 8 + len(header)
        self._file: BinaryIO = self._partial.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.truncate(self._base + end)

    def write(self, key: str, row: int, values: Tensor) -> None:
        """Rows of a tensor, from `row` on."""
        values = values.detach().contiguous()
        row_bytes = math.prod(values.shape[1:]) * values.dtype.itemsize
        self._file.seek(self._base + self._starts[key] + row * row_bytes)
        self._file.write(memoryview(values.cpu().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def close(self, complete: bool) -> None:
        self._file.close()
        if complete:
            os.replace(self._partial, self.path)
        else:
            self._partial.unlink(missing_ok=True)
