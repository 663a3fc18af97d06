"""The messages between the parent and its ranks, and their pickling."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.testing.rank_asserts import PytestSettings

# True in a rank while it imports the user's script: starting ranks from there would never end.
IMPORTING_MAIN: ContextVar[bool] = ContextVar("IMPORTING_MAIN", default=False)


_PROTOCOL = pickle.HIGHEST_PROTOCOL
# Makes a rank write its Python stack to its trace file.  (Windows has no such signal, and no ranks.)
TRACE_SIGNAL = getattr(signal, "SIGUSR1", signal.SIGTERM)


@dataclass(frozen=True)
class Birth:
    """The instructions of a new rank when it is forked."""

    rank: int
    num_ranks: int
    store_path: str
    trace_path: str
    group_timeout_s: float
    environ: Mapping[str, str] = field(repr=False)
    argv: Sequence[str]


@dataclass(frozen=True)
class CallMessage:
    """Parent to rank: the pickled (fn, args, kwargs) follow, which these are needed to load."""

    sys_path: list[str]
    cwd: str
    main: tuple[str, str] | None  # ("module", name) or ("path", file) of the parent's __main__, if the call uses it
    echo: bool  # forward what this rank prints
    pytest: PytestSettings | None = None  # of the session whose test calls
    home: tuple[str, str] | None = None  # name and file of the function's module, which pytest may import by no path


@dataclass(frozen=True)
class Ready:
    """Rank to parent: the process group is up."""


@dataclass(frozen=True)
class Printed:
    """Rank to parent: text written to sys.stdout."""

    text: str


@dataclass(frozen=True)
class Returned:
    """Rank to parent: the pickled result follows.

    `reusable` is False when the rank should be replaced before the next call.
    """

    reusable: bool


@dataclass(frozen=True)
class Raised:
    """Rank to parent: the function raised.  `when` is time.monotonic(), which all processes of a machine share."""

    summary: str
    traceback: str
    exception: bytes | None  # pickled, where that is possible both ways
    when: float
    report: bytes | None = None  # pickled, what pytest shows of it; in tests only
    printed: str = ""  # the last of what it printed and nobody has seen; in tests only


class _PlainPickler(pickle.Pickler):
    """Pickles tensors by value: detached, on the CPU, and without the rest of a larger storage they look into."""

    def reducer_override(self, obj: Any) -> Any:
        return _reduced_tensor(obj)


def _reduced_tensor(obj: Any) -> Any:
    """Return what a plain tensor is made of again; NotImplemented for other things."""
    if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided:
        return NotImplemented
    plain = obj.detach().cpu()
    if plain.device.type != "cpu" or type(plain) is not torch.Tensor:
        return NotImplemented
    if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
        plain = plain.clone()
    return plain.__reduce_ex__(_PROTOCOL)  # type: ignore[attr-defined]


def dumps(value: object) -> bytes:
    """Pickle by value; tensors arrive as plain CPU tensors without autograd history.

    Functions and classes that no module holds, those of a notebook's cells for instance, go by value where cloudpickle
    is installed.
    """
    buffer = io.BytesIO()
    try:
        _PlainPickler(buffer, protocol=_PROTOCOL).dump(value)
        return buffer.getvalue()
    except Exception:
        if find_spec("cloudpickle") is None:
            raise
    return dumps_by_value(value)


def dumps_by_value(value: object) -> bytes:
    """Pickle as `dumps` does, with the code of functions and classes that ranks cannot import."""
    import cloudpickle

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            plain = _reduced_tensor(obj)
            return super().reducer_override(obj) if plain is NotImplemented else plain

    buffer = io.BytesIO()
    ByValue(buffer, protocol=_PROTOCOL).dump(value)
    return buffer.getvalue()


def called(fn: Callable[..., object], args: Arguments, kwargs: Keywords) -> object:
    """Return the result of a call; an async function runs to its end."""
    result = fn(*args, **kwargs)
    if not inspect.iscoroutine(result):
        return result
    import asyncio

    return asyncio.run(result)


def dumps_result(result: object) -> bytes:
    """Pickle what a rank returns.

    Raises:
        ValueError: it cannot be pickled; says what it is.
    """
    try:
        return dumps(result)
    except Exception as error:
        raise ValueError(
            f"the result, of type {type(result).__name__}, cannot be sent from its rank: {error}\n"
            "  fix: return numbers, strings, tensors or containers of these, such as a list of what a generator yields"
        ) from error


def pickle_call(fn: Callable[..., object], args: Arguments, kwargs: Keywords) -> bytes:
    """Pickle a call for the ranks.

    Raises:
        ValueError: the function cannot be imported by name, or an argument cannot be pickled; says which.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    by_value = "  fix: pip install cloudpickle, which sends its code"
    is_typed = getattr(fn, "__module__", None) == "__main__" and describe_main() is None
    try:
        pickle.dumps(fn)
    except Exception as error:
        if find_spec("cloudpickle") is None:
            raise ValueError(
                f"{name} cannot be sent to the ranks: {error}\n"
                "  ranks are other processes, which import the function by its name; lambdas and functions defined "
                "inside functions have none\n"
                "  fix: define it at module level and pass what it captured as arguments\n"
                f"{by_value}"
            ) from error
        is_typed = True
    if is_typed and find_spec("cloudpickle") is None:
        raise ValueError(
            f"{name} cannot be sent to the ranks: it was typed at a prompt, in a notebook or piped in, so no file "
            f"holds it\n  fix: put it into a file and import it from there\n{by_value}"
        )
    try:
        return (dumps_by_value if is_typed else dumps)((fn, args, kwargs))
    except Exception as error:
        raise ValueError(f"an argument of {name} cannot be pickled for the ranks: {error}") from error


def home_of(fn: Callable[..., object]) -> tuple[str, str] | None:
    """Name and file of the module that a function is in; None where it has none, or is of the main script."""
    name = getattr(fn, "__module__", None)
    path = getattr(sys.modules.get(name or ""), "__file__", None)
    return (name, path) if name and path and name != "__main__" else None


def describe_main() -> tuple[str, str] | None:
    """Return where the parent's `__main__` can be imported from; None for a prompt, `-c` or standard input."""
    main: ModuleType | None = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path):
        return None
    return "path", os.path.abspath(path)
