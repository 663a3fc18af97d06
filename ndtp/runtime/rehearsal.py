"""A step as torch's operations, one after another: what of it a CUDA graph cannot hold, by the line of the program."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from ndtp.collectives.backends import backend_of
from ndtp.collectives.streams import has_streams
from ndtp.compute.torch_calls import Arguments, Keywords

# Operations whose result the host must have before it can go on.
READS_IN_HOST = {
    "_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "unique_dim", "_unique2", "unique_consecutive",
    "masked_select", "bincount", "repeat_interleave",
}  # fmt: skip
DRAWS = {"bernoulli", "bernoulli_", "rand", "randn", "randint", "randperm", "uniform_", "normal_", "random_"}
_COPIES = {"_to_copy", "copy_", "to"}
_MACHINERY = ("/torch/", "/contextlib.py", "/ndtp/runtime/rehearsal.py", "/ndtp/testing/cuda/")
_LIBRARIES = ("/site-packages/", "/ndtp/", "/contextlib.py")
_CALL = nn.Module._call_impl.__code__
MOST_NAMED = 8


class SourceLine(NamedTuple):
    """A line of a program, and the line of a library that it led to."""

    place: str
    within: str = ""

    def __str__(self) -> str:
        return self.place + f" (in {self.within})" * bool(self.within)


class Hazard(NamedTuple):
    """Something that a graph cannot hold."""

    line: SourceLine
    what: str

    def __str__(self) -> str:
        return f"{self.line}: {self.what}"


class Done(NamedTuple):
    """An operation: its name, where tensors of what form went in, and the numbers beside them."""

    name: str
    form: tuple[Any, ...]
    line: SourceLine


class StepWatch(TorchDispatchMode):
    """Watch one run of a step.

    Attributes:
        hazards: what a graph cannot hold.
        done: the operations, in order.
        modules: that were called, by their identity, outermost first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hazards: list[Hazard] = []
        self.done: list[Done] = []
        self.modules: dict[int, nn.Module] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._look_at_group(args)
        elif any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        result = func(*args, **kwargs)
        line = _line()
        self._note_modules()
        self._look_at(name, args, kwargs, result, line)
        self.done.append(Done(name, tuple(_forms([*args, *kwargs.values()])), line))
        return result

    def _note_modules(self) -> None:
        """Note the modules in whose call the program is.  A global hook of torch would have blocks run in parts."""
        frame: Any = sys._getframe(2)
        found: list[nn.Module] = []
        while frame is not None:
            if frame.f_code is _CALL:
                found.append(frame.f_locals["self"])
            frame = frame.f_back
        for module in reversed(found):
            self.modules.setdefault(id(module), module)

    def _look_at(self, name: str, args: Arguments, kwargs: Keywords, result: object, line: SourceLine) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        on_device = [x for x in given if has_streams(x.device.type)]
        if name in READS_IN_HOST and on_device and not (name == "repeat_interleave" and len(given) == 1):
            self.hazards.append(Hazard(line, f"aten.{name}: the host reads a tensor of the device, and waits for it"))
        elif name in _COPIES:
            self._look_at_copy(name, given, result, line)
        elif name in DRAWS and isinstance(result, Tensor) and not has_streams(result.device.type):
            self.hazards.append(Hazard(line, f"aten.{name}: drawn in the host, where a replay draws nothing"))

    def _look_at_copy(self, name: str, given: Sequence[Tensor], result: Any, line: SourceLine) -> None:
        source, target = (given[-1], given[0]) if name == "copy_" and len(given) > 1 else (given[0], result)
        if source.is_meta or target.is_meta:
            return
        comes, goes = has_streams(source.device.type), has_streams(target.device.type)
        if comes and not goes:
            self.hazards.append(Hazard(line, f"aten.{name}: a copy to the host, which the host would read"))
        elif goes and not comes and target.numel() > 0:
            self.hazards.append(
                Hazard(line, f"aten.{name}: a copy from the host; a replay repeats the values of the capture")
            )

    def _look_at_group(self, args: Arguments) -> None:
        for each in args:
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
                group = dist.ProcessGroup.unbox(each)
                if (backend := backend_of(group)).runs_in_host:
                    self.hazards.append(Hazard(_line(), f"a collective over {backend.name}, which runs in the host"))


def differences(one: StepWatch, other: StepWatch) -> list[Hazard]:
    """Return the differences between two runs of a step, of which a graph would repeat the last one for ever."""
    found: list[Hazard] = []
    for a, b in zip(one.done, other.done, strict=False):
        if a.name != b.name:
            return [
                *found,
                Hazard(
                    b.line, f"another operation than in the call before: aten.{b.name}, not aten.{a.name} of {a.line}"
                ),
            ]
        if a.form != b.form:
            was, now = next((x, y) for x, y in zip(a.form, b.form, strict=False) if x != y)
            found.append(
                Hazard(b.line, f"aten.{b.name}: {now}, where the call before had {was}; a graph keeps one of them")
            )
    if len(one.done) != len(other.done):
        more = max(one.done, other.done, key=len)[min(len(one.done), len(other.done))]
        found.append(Hazard(more.line, f"{len(other.done)} operations, where the call before had {len(one.done)}"))
    return found


def described(hazards: Sequence[Hazard]) -> str:
    """A line for each thing that stands in the way."""
    lines = [f"  {each}" for each in dict.fromkeys(hazards)]
    more = [f"  and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
    return "\n".join([*lines[:MOST_NAMED], *more])


def _forms(parts: Sequence[object]) -> Iterator[Any]:
    """The forms of tensors, and the numbers beside them."""
    for part in parts:
        if isinstance(part, Tensor):
            yield tuple(part.shape), str(part.dtype), part.device.type
        elif isinstance(part, (list, tuple)):
            yield from _forms(part)
        elif isinstance(part, (bool, int, float, complex, str, torch.dtype)):
            yield part if part == part else "nan"


def _line() -> SourceLine:
    """The line that the program is at: the innermost one outside of libraries, or outside of torch where all are."""
    frame: Any = sys._getframe(2)
    within = ""
    while frame is not None:
        name = frame.f_code.co_filename
        is_library = any(place in name for place in _LIBRARIES) and "/ndtp/cli/" not in name
        if not is_library:
            return SourceLine(f"{Path(name).name}:{frame.f_lineno}", within)
        if not within and not any(place in name for place in _MACHINERY):
            within = f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return SourceLine(within or "torch")
