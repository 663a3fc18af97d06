"""A device without a device: torch takes its tensors for those of an accelerator, and computes on them on the CPU.

Mixed devices raise the errors that CUDA raises, backward runs in a thread of the device, and process groups have a
backend for it beside that of the CPU.  So code is tried for an accelerator where there is none: a constant made on the
host, a tensor that stayed behind, a thread that is taken for another caller.  Streams, graphs and kernels are not
emulated; `ndtp.testing.cuda` records those.

    from ndtp.testing import emulated
    emulated.start()                                            # compiles once for each version of torch
    dist.init_process_group(emulated.BACKENDS, ...)
    model.to("emulated")
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import time
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ndtp.collectives.backends import FAKE, KNOWN, Backend
from ndtp.collectives.torch_patches import in_place
from ndtp.testing.emulated.compiled import build as build

NAME = "emulated"
BACKENDS = f"cpu:gloo,{NAME}:{NAME}"  # of `init_process_group`


@functools.cache
def start() -> None:
    """Add the device `emulated` to torch, in this process and for good.

    Raises:
        RuntimeError: of torch, where it finds no C++ compiler or no ninja, or has another device of this kind already.
    """
    library = _library()
    torch.utils.rename_privateuse1_backend(NAME)
    library.start()
    torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
    torch.utils.generate_methods_for_privateuse1_backend()
    KNOWN[NAME] = Backend(NAME, device_type=NAME)
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # adds the fake backend
    in_place("torch.distributed.Backend.backend_capability")[FAKE.name].append(NAME)
    atexit.register(_let_go)
    dist.Backend.register_backend(NAME, functools.partial(_group, library), devices=[NAME])


def _let_go() -> None:
    """Give the thread of the device time to free the Python objects of its last backward: at the end it cannot."""
    time.sleep(0.1)


def _group(library: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return library.on_host(dist.ProcessGroupGloo(store, rank, size, timeout))


def _library() -> Any:
    """Return the compiled extension as a module."""
    from torch.utils import cpp_extension

    path = build()
    return cpp_extension._import_module_from_library(path.stem, str(path.parent), is_python_module=True)


class _Stream:
    """A stream, the only one, and any event of it: all work is done when a call returns."""

    def synchronize(self, *_: object) -> None:
        """Wait for nothing."""

    wait_stream = wait_event = record = wait = synchronize

    def record_event(self, *_: object) -> _Stream:
        return self

    def query(self) -> bool:
        return True


class _Module(ModuleType):
    """The module `torch.emulated`, as `torch.cuda` is CUDA's: one device, whose generator is that of the CPU."""

    device = stream = contextlib.nullcontext
    Stream = Event = _Stream

    @staticmethod
    def current_stream(*_: object) -> _Stream:
        return _Stream()

    default_stream = current_stream

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def synchronize(*_: object) -> None:
        """Wait for nothing: what is computed is computed at once."""

    set_device = manual_seed = manual_seed_all = _lazy_init = synchronize

    @staticmethod
    def get_rng_state(*_: object) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_: object) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
