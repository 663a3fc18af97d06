"""Files that somebody else may have written: opened, read and parsed without more than they may cost.

Nothing that waits (a FIFO, a device) is opened to the end, and no JSON takes more memory than a few hundred MB.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ndtp.errors import CheckpointError

MOST_BYTES = 100_000_000  # of metadata: the longest header of the safetensors format
MOST_NODES = 4_000_000  # values of a JSON text: 120 bytes of memory each, at worst


def opened(path: Path) -> BinaryIO:
    """A file to read, which may be reached by a link.

    Raises:
        CheckpointError: there is no such file, or it is no regular one.
    """
    try:
        # Without O_NONBLOCK opening a FIFO would wait for somebody to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_all(path: Path, most: int = MOST_BYTES) -> bytes:
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(f"{path}: {size:,} bytes of metadata, and no more than {most:,} are read")
        return file.read(size)


def parsed(text: bytes, path: Path) -> dict[str, Any]:
    """The object that a JSON text is.

    Raises:
        CheckpointError: no JSON, no object, or one that is too deep or has too many values.
    """
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MOST_NODES:
        raise CheckpointError(f"{path}: JSON of more than {MOST_NODES:,} values")
    try:
        found = json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{path}: JSON that is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: JSON of {type(found).__name__}, not an object")
    return found


def inside(folder: Path, name: object) -> Path:
    """The path of a file by the name that metadata have for it.

    Raises:
        CheckpointError: a name that leads out of the folder.
    """
    path = Path(str(name))
    if not isinstance(name, str) or not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{folder}: the name {name!r:.100} of a file leads out of the folder")
    return folder / path


def sizes(value: object, path: Path, what: str) -> tuple[int, ...]:
    """Whole numbers, none of them negative.

    Raises:
        CheckpointError: anything else.
    """
    if not isinstance(value, (list, tuple)) or not all(type(each) is int and each >= 0 for each in value):
        raise CheckpointError(f"{path}: the sizes of {what} are {value!r:.100}")
    if len(value) > 64:
        raise CheckpointError(f"{path}: {what} has {len(value)} dims")
    return tuple(value)
