"""Code that reads the weight of a layer on the grid beside plain tensors: refused by name.

A layer on the grid keeps its parameters as DTensors; code that calls the layer never sees them.  Code that takes the
numbers itself, `F.linear(x, self.proj.weight)`, ends in an error of torch that tells of DTensors alone.  What was read
is found when that error comes by, in the statement that raised it: nothing is watched before.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from ndtp.errors import LayoutError
from ndtp.models.boundary import BoundaryLinear
from ndtp.runtime.arrival import is_plain

MIXED = "mixed torch.Tensor and DTensor"


class NamesReads:
    """The class of a model whose errors name the parameter that its code has read."""


def name_reads(model: nn.Module) -> None:
    """Let a model's forward say which parameter on the grid its code has taken for a plain one."""
    theirs: Any = type(model)
    if isinstance(model, NamesReads):
        return

    @functools.wraps(theirs.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return theirs.forward(self, *args, **kwargs)
        try:
            return theirs.forward(self, *args, **kwargs)
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            raise _named(self, error) from error

    made = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__, "forward": forward}
    model.__class__ = type(theirs.__name__, (NamesReads, theirs), made)


def _named(model: nn.Module, error: RuntimeError) -> LayoutError:
    frame, line = _reader(error.__traceback__)
    modules = dict(model.named_modules())
    names = {
        id(p): (owner, key)
        for owner, module in modules.items()
        for key, p in module._parameters.items()
        if p is not None and not is_plain(p)
    }
    found = [names[i] for i in _parameters_read(frame, line, names)]
    reader: Any = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    code = f"the code of {type(reader).__name__}" if isinstance(reader, nn.Module) else frame.f_code.co_name
    where = f"{frame.f_code.co_filename}, line {line}"
    if not found:
        return LayoutError(
            f"parallelize: {code} takes a parameter that is on the grid beside tensors that are not\n  at {where}\n"
            "  fix: call the layer that has it, or leave that layer whole, by keep="
        )
    owners = list(dict.fromkeys(owner for owner, _ in found))
    fix = f"keep={owners}, which leaves them whole"
    if any(isinstance(modules[owner], BoundaryLinear) for owner in owners):
        fix = f"name the pairs that are to be replaced in plan=, without {', '.join(owners)}"
    read = [f"'{owner}.{key}' {tuple(getattr(modules[owner], key).shape)}" for owner, key in found]
    return LayoutError(
        f"parallelize: {code} reads {' and '.join(read)}, on the grid, beside tensors that are not\n  at {where}\n"
        f"  fix: call the layers; or {fix}"
    )


def _reader(traceback: TracebackType | None) -> tuple[FrameType, int]:
    """The innermost frame that is neither torch's nor ndtp's, and its line."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    of = lambda frame: str(frame.f_globals.get("__name__", "")).partition(".")[0]  # noqa: E731
    return next((each for each in reversed(frames) if of(each[0]) not in ("torch", "ndtp")), frames[-1])


def _parameters_read(frame: FrameType, line: int, names: Mapping[int, Any]) -> list[int]:
    """Ids of parameters that a function's code names: in the statement that failed, or else anywhere in it."""
    try:
        source, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, SyntaxError):
        source, first, tree = [], 0, ast.Module([], [])
    at = line - first + 1
    simple = [s for s in ast.walk(tree) if isinstance(s, ast.stmt) and not hasattr(s, "body")]
    failed = [s for s in simple if s.lineno <= at <= (s.end_lineno or s.lineno)]
    for nodes in (failed, [tree]):
        values = [_value(part, frame) for node in nodes for part in ast.walk(node)]
        found = list(dict.fromkeys(id(value) for value in values if id(value) in names))
        if found:
            return found
    return []


def _value(node: Any, frame: FrameType) -> Any:
    """What a name, or an attribute of a module, stands for; None of anything that would have to run."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    get: Callable[[Any], Any] | None = None
    if isinstance(node, ast.Attribute):
        get = lambda owner: vars(owner).get(node.attr, _held(owner, node.attr))  # noqa: E731
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key = node.slice.value
        get = lambda owner: list(owner.children())[key] if type(key) is int else _held(owner, str(key))  # noqa: E731
    owner = None if get is None else _value(node.value, frame)
    try:
        return get(owner) if get is not None and isinstance(owner, nn.Module) else None
    except IndexError:
        return None


def _held(owner: nn.Module, name: str) -> Any:
    return owner._parameters.get(name, owner._modules.get(name))
