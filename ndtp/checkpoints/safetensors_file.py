"""Files of the safetensors format, read and written block by block of rows, with a checksum of each block.

A file is the length of its header (8 bytes, little endian), the header, a JSON object of `{key: {dtype, shape,
data_offsets}}`, and the tensors' bytes, row major.  The format's own library maps a file, or takes all tensors at once,
and knows no checksums; here no more than one block of rows is in memory, and what is wrong with a file is known before
a tensor is touched.  The header's `__metadata__`, which other readers pass over, has two entries of ours:

    ndtp                the CRC-32 of the header (with eight zeros in its place), and of each tensor's blocks of rows,
                        which are as many rows as fit into so many bytes
    DCP_SHARDING_INFO   where each tensor lies in a larger one, as torch's own reader (DCP) has it

Source: https://github.com/huggingface/safetensors, "Format"; torch.distributed.checkpoint._hf_utils.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from ndtp.checkpoints.guarded import MOST_BYTES, inside, opened, parsed, read_all, sizes
from ndtp.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_BYTES = 1 << 22
INDEX = ".safetensors.index.json"
OURS, SHARDING, OFFSETS = "ndtp", "DCP_SHARDING_INFO", "saved_offsets"
METADATA = "__metadata__"
START = b'{"__metadata__": {"ndtp": "'  # what follows is the checksum of the header
UNKNOWN = "0" * 8


class StoredBox(NamedTuple):
    """A tensor of a file, or a box of a larger tensor.

    Attributes:
        start: of its bytes in the file.
        offset: of the box in the tensor.
        sums: the checksums of its blocks of `step` rows; nothing where the file has none.
    """

    key: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    offset: tuple[int, ...]
    sums: tuple[int, ...] = ()
    step: int = 1

    def __str__(self) -> str:
        return f"{self.shape} {NAMES[self.dtype]}"

    def read(self, part: Sequence[slice], into: Tensor | None, block_bytes: int = BLOCK_BYTES) -> None:
        """Copy `part` of it into `into`, of its shape, block by block of whole rows; None: check its blocks alone.

        Raises:
            CheckpointError: a block is not what was written, or the file has become shorter.
            OSError: the file cannot be read.
        """
        rows, rest = (tuple(part) or (slice(0, 1),))[0], tuple(part)[1:]
        shape = self.shape or (1,)
        row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        if row_bytes * (rows.stop - rows.start) == 0:
            return
        if into is not None:
            into = into if self.shape else into.view(1)
        step = self.step if self.sums else max(block_bytes // row_bytes, 1)
        start = rows.start // step * step if self.sums else rows.start
        most = shape[0] if self.sums else rows.stop - rows.start
        memory = torch.empty(min(step, most) * row_bytes, dtype=torch.uint8, device="cpu")
        with opened(self.path) as file:
            for first in range(start, rows.stop, step):
                last = min(first + step, shape[0] if self.sums else rows.stop)
                block = memory[: (last - first) * row_bytes]
                _fill(file, self.start + first * row_bytes, block, self)
                if self.sums and crc32(memoryview(block.numpy())) != self.sums[first // step]:  # type: ignore[arg-type]
                    raise CheckpointError(
                        f"{self.path}: '{self.key}': rows {first} to {last - 1} are not those that were written"
                    )
                if into is not None:
                    here = slice(max(first, rows.start), min(last, rows.stop))
                    values = block.view(self.dtype).view(last - first, *shape[1:])
                    here_in_block = (slice(here.start - first, here.stop - first), *rest)
                    into[here.start - rows.start : here.stop - rows.start].copy_(values[here_in_block])


def _fill(file: BinaryIO, start: int, block: Tensor, what: StoredBox) -> None:
    view = memoryview(block.numpy())  # type: ignore[arg-type]
    file.seek(start)
    while view.nbytes:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{what.path}: cut short in '{what.key}', at byte {file.tell()}")
        view = view[count:]


def blocks_of(shape: Sequence[int], dtype: torch.dtype, block_bytes: int) -> tuple[int, int]:
    """Return how many rows of a tensor share a checksum, and how many checksums there are."""
    step = max(block_bytes // max(math.prod(shape[1:]) * dtype.itemsize, 1), 1)
    return step, -(-shape[0] // step) if math.prod(shape) else 0


def tensors_in(path: str | os.PathLike[str]) -> dict[str, StoredBox]:
    """Return the tensors of a folder, a file or an index of several files, by key; only headers are read.

    Raises:
        CheckpointError: nothing is there, a file is cut short or no safetensors file, a key that the index names is not
            in its file.  Names the file, and the key where there is one.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file")
    if not path.name.endswith(".json"):
        return header_of(path)[0]
    places = parsed(read_all(path), path).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{path}: no index of safetensors files: it has no weight_map")
    headers: dict[str, dict[str, StoredBox]] = {}
    found = {}
    for key, name in places.items():
        file = inside(path.parent, name)
        if name not in headers:
            if not os.path.exists(file):  # a name may be longer than a file's can be
                raise CheckpointError(f"{path}: '{key:.100}' is in {name:.100}, which is not there")
            headers[name] = header_of(file)[0]
        if key not in headers[name]:
            raise CheckpointError(f"{path}: '{key:.100}' is said to be in {name}, which has no such key")
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


def header_of(path: Path, known: tuple[int, int] | None = None) -> tuple[dict[str, StoredBox], int, int]:
    """The tensors of a file, its size, and the checksum of its header; `known` is what these two have to be.

    Raises:
        CheckpointError: no safetensors file, or one that is cut short or not what was written.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if size < 8 or length > min(MOST_BYTES, size - 8):
            raise CheckpointError(f"{path}: no safetensors file, or cut short: {size} bytes, a header of {length}")
        text = file.read(length)
    checksum = crc32(first + text)
    if known is not None and size != known[0]:
        raise CheckpointError(f"{path}: cut short: {size:,} bytes of {known[0]:,}")
    if known is not None and checksum != known[1]:
        raise CheckpointError(f"{path}: its header is not the one that was written")
    entries = parsed(text, path)
    extra = entries.pop(METADATA, None)
    checks = {}
    offsets = {}
    if isinstance(extra, dict) and isinstance(extra.get(OURS), str):
        at = len(START) + len(UNKNOWN)
        if not text.startswith(START) or text[len(START) : at] != b"%08x" % crc32(_blank(text)):
            raise CheckpointError(f"{path}: its header is not the one that was written")
        checks = parsed(extra[OURS][len(UNKNOWN) :].encode(), path)
        offsets = parsed(str(extra.get(SHARDING, "{}")).encode(), path)
    found = {}
    for key, value in entries.items():
        stored = found[key] = _entry(key, path, 8 + length, value, checks, offsets.get(key))
        end = stored.start + math.prod(stored.shape) * stored.dtype.itemsize
        if end > size:
            raise CheckpointError(f"{path}: cut short: '{key}' {stored} ends at byte {end}, the file at {size}")
    return found, size, checksum


def is_of_writer(path: Path) -> bool:
    """Return whether a file begins as those of `Writer` do."""
    try:
        with opened(path) as file:
            return file.read(8 + len(START))[8:] == START
    except (CheckpointError, OSError):
        return False


def _blank(header: bytes) -> bytes:
    return header[: len(START)] + UNKNOWN.encode() + header[len(START) + len(UNKNOWN) :]


def _entry(key: str, path: Path, base: int, value: object, checks: Mapping[str, Any], where: object) -> StoredBox:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise CheckpointError(f"{path}: its header is none of a safetensors file: '{key}' is {value!r:.100}")
    if value["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: '{key}' is of the dtype {value['dtype']:.20}, which torch or ndtp does not have"
        )
    dtype, shape = DTYPES[value["dtype"]], sizes(value.get("shape"), path, f"'{key}'")
    span = sizes(value.get("data_offsets"), path, f"'{key}'")
    if len(span) != 2 or span[1] - span[0] != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: its header is none of a safetensors file: '{key}' lies at {span}")
    offset = sizes(where.get(OFFSETS), path, f"'{key}'") if isinstance(where, dict) else (0,) * len(shape)
    if len(offset) != len(shape):
        raise CheckpointError(f"{path}: '{key}' {shape} is said to begin at {offset}")
    stored = StoredBox(key, path, dtype, shape, base + span[0], offset)
    if not checks:
        return stored
    try:
        step, count = blocks_of(shape or (1,), dtype, int(checks["block_bytes"]))
        found = bytes.fromhex(checks["crc32"][key])
    except (ValueError, TypeError, KeyError):
        step, count, found = 1, -1, b""
    if len(found) != 4 * count:
        raise CheckpointError(f"{path}: '{key}' has other checksums than its blocks")
    return stored._replace(step=step, sums=tuple(int.from_bytes(found[4 * i : 4 * i + 4], "big") for i in range(count)))


class Writer:
    """A file whose tensors are written in any order, in blocks of rows; it has its name when it is complete.

    Args:
        offsets: where the tensors lie in larger ones, if they are boxes of these.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        offsets: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.path, self._offsets = path, offsets
        self._entries: dict[str, Any] = {}
        self._sums: dict[str, list[int | None]] = {}
        self._steps: dict[str, int] = {}
        end = 0
        for key, (dtype, shape) in sorted(tensors.items(), key=lambda each: -each[1][0].itemsize):  # all are aligned
            size = math.prod(shape) * dtype.itemsize
            self._entries[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self._steps[key], count = blocks_of(tuple(shape) or (1,), dtype, BLOCK_BYTES)
            self._sums[key] = [None] * count
            end += size
        self._base = len(self._header())
        self._end = self._base + end
        # A name of its own: where several meshes have the same model, each writes all of it, and the last one stays.
        self._partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        self._file = self._partial.open("x+b", buffering=0)

    def _header(self) -> bytes:
        """The header with its length, which is the same whatever the checksums are."""
        sums = {key: "".join(f"{each or 0:08x}" for each in found) for key, found in self._sums.items()}
        checks = json.dumps({"block_bytes": BLOCK_BYTES, "crc32": sums})
        extra = {OURS: UNKNOWN + checks, "format": "pt"}
        if self._offsets is not None:
            every = {key: {OFFSETS: list(offset)} for key, offset in self._offsets.items()}
            extra[SHARDING] = json.dumps(every)
        text = json.dumps({METADATA: extra, **self._entries}).encode()
        text += b" " * (-len(text) % 8)
        assert text.startswith(START + UNKNOWN.encode())
        text = START + b"%08x" % crc32(text) + text[len(START) + len(UNKNOWN) :]
        return len(text).to_bytes(8, "little") + text

    def write(self, key: str, row: int, values: Tensor) -> None:
        """Rows of a tensor, from `row` on."""
        entry, sums = self._entries[key], self._sums[key]
        shape, dtype = entry["shape"] or [1], values.dtype
        values = values.detach().view(-1, *shape[1:]) if values.dim() == 0 else values.detach()
        step, row_bytes = self._steps[key], math.prod(shape[1:]) * dtype.itemsize
        for first in range(row // step * step, row + len(values) if values.numel() else 0, step):
            here = slice(max(first, row), min(first + step, row + len(values)))
            block = values[here.start - row : here.stop - row].contiguous().cpu().flatten().view(torch.uint8)
            view = memoryview(block.numpy())  # type: ignore[arg-type]
            self._write(self._base + entry["data_offsets"][0] + here.start * row_bytes, view)
            if here.start == first and here.stop == min(first + step, shape[0]):
                sums[first // step] = crc32(view)

    def _write(self, at: int, view: memoryview) -> None:
        while view.nbytes:
            count = os.pwrite(self._file.fileno(), view, at)
            at, view = at + count, view[count:]

    def close(self, complete: bool) -> tuple[int, int]:
        """Give the file its name, if it is complete; its size, and the checksum of its header."""
        header = b""
        try:
            if complete:
                for key, block in self._unknown():
                    self._sums[key][block] = self._read_back(key, block)
                header = self._header()
                self._file.truncate(self._end)
                self._write(0, memoryview(header))
                os.fsync(self._file.fileno())
                os.replace(self._partial, self.path)
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)
        return self._end, crc32(header)

    def _unknown(self) -> Iterator[tuple[str, int]]:
        """Blocks that were written in several parts."""
        return ((key, i) for key, sums in self._sums.items() for i, known in enumerate(sums) if known is None)

    def _read_back(self, key: str, block: int) -> int:
        entry = self._entries[key]
        shape, dtype, (start, end) = entry["shape"] or [1], DTYPES[entry["dtype"]], entry["data_offsets"]
        size = self._steps[key] * math.prod(shape[1:]) * dtype.itemsize
        at = start + block * size
        return crc32(os.pread(self._file.fileno(), min(size, end - at), self._base + at))


def write_file(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
) -> tuple[int, int]:
    """Write a file of whole tensors; return what `Writer.close` does."""
    writer, complete = Writer(path, {key: (x.dtype, x.shape) for key, x in tensors.items()}, offsets), False
    try:
        for key, x in tensors.items():
            writer.write(key, 0, x)
        complete = True
    finally:
        facts = writer.close(complete)
    return facts
