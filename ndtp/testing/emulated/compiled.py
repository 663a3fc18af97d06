"""The compiled part of the emulated device: the processes of a host share one, built once for each version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_COMPILE = """
import sys
from torch.utils import cpp_extension
name, folder, *sources = sys.argv[1:]
cpp_extension.load(name, sources, extra_cflags=["-O1"], build_directory=folder)
"""


def build() -> Path:
    """Return the path of the compiled extension, after it is compiled, in a process of its own, where it is missing.

    A process that is killed while it builds leaves nothing that a later one would take or wait for: the system lets go
    of its lock, and the extension gets its name only once it is whole.

    Raises:
        RuntimeError: with the compiler's words, also where there is no C++ compiler or no ninja.
    """
    from torch.utils import cpp_extension

    sources = sorted(_FOLDER.glob("*.cpp"))
    texts = [*(path.read_text() for path in (*sources, _FOLDER / "device.h")), _COMPILE, torch.__version__, sys.version]
    name = f"ndtp_emulated_{hashlib.blake2b(''.join(texts).encode(), digest_size=6).hexdigest()}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    library = folder / f"{name}.so"
    if library.exists():
        return library
    with open(folder / "builder", "w") as builder:
        fcntl.flock(builder, fcntl.LOCK_EX)
        if library.exists():
            return library
        for left_behind in folder.glob("unfinished-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        scratch = tempfile.mkdtemp(prefix="unfinished-", dir=folder)
        command = [sys.executable, "-c", _COMPILE, name, scratch, *map(str, sources)]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        if compiled.returncode != 0:
            raise RuntimeError(f"the emulated device could not be compiled: {compiled.stderr[-2000:].strip()}")
        os.replace(Path(scratch) / library.name, library)
        shutil.rmtree(scratch)
    return library
