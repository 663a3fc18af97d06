"""The root of a model on the grid: while its forward runs, code finds parameters that it can compute with.

So do the other methods that compute with the model: `generate`, and what it or the forward calls of the model's own
(`get_image_features`), also where a user calls it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.compute.traces import refuse_traces
from ndtp.errors import LayoutError
from ndtp.models.code_reads import CodeReads, wants_gradients
from ndtp.models.compared_calls import compare_generated
from ndtp.models.forward_code import function_below
from ndtp.models.frame import Frame
from ndtp.models.made_classes import made_class
from ndtp.models.noted import Noted, settle
from ndtp.runtime.default_group import OwnRows
from ndtp.runtime.grid_like import GridLike
from ndtp.runtime.grid_tensor import KINDS
from ndtp.runtime.memories import refuse_later_writes
from ndtp.split.same_rows import note_rows

_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # options of `generate`


class AtWork:
    """The class of such a root."""


class RootRows(OwnRows):
    """The ranks that have other rows, for the code of a root."""

    def __init__(self, frame: Frame, name: str) -> None:
        super().__init__(frame.mesh, frame.outside.dims[0], name)
        self.frame = frame

    def while_running(self) -> _GeneratorContextManager[None]:
        """A context in which code of the model runs again, in a checkpoint's backward, as in the forward of now."""
        running = self.frame.running
        return self._again(bool(running) and running[0] is not None and running[0].wants_inputs)

    @contextmanager
    def _again(self, wants_inputs: bool) -> Iterator[None]:
        reads = CodeReads()
        reads.wants_inputs = wants_inputs
        self.frame.running.append(reads)
        try:
            with super().while_running():
                yield
        finally:
            self.frame.running.pop()
            if not self.frame.running:
                self.frame.forget_shared()
            reads.watch(())  # a checkpoint stops its code by an exception as soon as it has all that was saved


def reads_parameters(model: nn.Module, frame: Frame, compiles: bool = False) -> None:
    """Let a model's methods note which parameters their code reads; a backward after they changed is refused.

    Args:
        compiles: whether the model is compiled as a whole, where nothing is noted.
    """
    theirs: Any = type(model)
    if isinstance(model, AtWork):
        return
    made = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__}
    model.ndtp_rows = RootRows(frame, theirs.__name__)  # type: ignore[assignment]
    methods = {name: _noting(theirs, name, frame.mesh, compiles) for name in ("forward", *computing(theirs))}
    model.__class__ = made_class(theirs.__name__, (AtWork, theirs), made | methods)


def _noting(theirs: Any, name: str, mesh: GridLike, compiles: bool) -> Any:
    method = getattr(theirs, name)
    is_synced = "synced_gpus" in inspect.signature(method).parameters  # `generate` of transformers

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_traces(theirs.__name__, exports=False)
        if compiles and torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        rows: RootRows | None = vars(self).get("ndtp_rows")  # of this model: a copy has its own
        if rows is None:  # code has made another model of this class, as a slice of `nn.Sequential` is one
            return method(self, *args, **kwargs)
        running = rows.frame.running
        if is_synced and rows.axes:
            _refuse_drafts(theirs.__name__, self, kwargs)
            kwargs["synced_gpus"] = True  # ranks whose rows have ended call on until all others' have
        if name != "forward" and running:  # called by what notes already
            return method(self, *args, **kwargs)
        if not running:
            args, kwargs = tuple(map(_plain, args)), {key: _plain(value) for key, value in kwargs.items()}
        reads = CodeReads()
        reads.wants_inputs = not running and wants_gradients(args, kwargs)  # the root's are asked for
        if not running and not torch.compiler.is_compiling():
            refuse_later_writes()
        before = rows.frame.generates
        if name == "forward":
            rows.frame.begin(self)
        elif name == "generate":
            rows.frame.generates = True
        running.append(reads)
        rows.begin()
        try:
            with cast_for(mesh):  # not of a dry run's, which has no autocast
                given = method(self, *args, **kwargs)
        finally:
            rows.end()
            running.pop()
            rows.frame.generates = before
            if name == "forward":
                rows.frame.end()
            if not running and torch.is_grad_enabled():
                rows.frame.forget_shared()
        if not running:
            settle(given)
            note_rows(rows.mesh, rows.axes, given)
            if name == "generate":
                compare_generated(self, given)
        if reads.read:
            reads.watch(given, Noted)
        return given

    return run


def _plain(given: Any) -> Any:
    """Return an argument, in which what code has made of parameters of the grid is plain tensors of the whole.

    A state of a recurrent model often is: `next(model.parameters()).new_zeros(...)`.
    """
    if type(given) is Tensor:
        return given
    if isinstance(given, KINDS):
        return given if isinstance(given, nn.Parameter) else given.full_tensor()
    if type(given) in (tuple, list):
        made = [*map(_plain, given)]
        return given if all(map(is_, made, given)) else type(given)(made)
    if type(given) is dict:
        changed = {key: _plain(value) for key, value in given.items()}
        return given if all(map(is_, changed.values(), given.values())) else changed
    return given


def _refuse_drafts(who: str, model: nn.Module, given: dict[str, Any]) -> None:
    """Refuse drafts where ranks have rows of their own: each accepts another number of tokens."""
    config = given.get("generation_config") or getattr(model, "generation_config", None)
    for name in _DRAFTS:
        if given.get(name) is not None or getattr(config, name, None) is not None:
            raise LayoutError(
                f"{who}.generate: {name}= along an axis on which ranks have rows of their own: each rank accepts "
                "another number of drafted tokens, so that their steps come apart\n"
                "  fix: leave out the drafts, or use a grid without a dp axis"
            )


def cast_for(mesh: GridLike) -> AbstractContextManager[Any]:
    """Return in what a model's code runs: autocast, where its products multiply in bf16 (`ndtp.Wire.products`)."""
    if mesh.wire is None or mesh.wire.products != "bf16":
        return nullcontext()
    return torch.autocast(mesh.device_type, torch.bfloat16)


def computing(kind: Any) -> set[str]:
    """Names of methods that the forward of a class, or its `generate`, calls by their name, and of that one."""
    found: set[str] = set()
    waiting = ["forward", "generate"]
    while waiting:
        name = waiting.pop()
        method: object = inspect.getattr_static(kind, name, None)
        is_method = isinstance(method, types.FunctionType) and (name == "forward" or not hasattr(nn.Module, name))
        if name in found or not is_method:
            continue
        found.add(name)
        written = function_below(method)
        if written is not None and not _is_of_a_base(written):
            waiting += [each for each in written.__code__.co_names if not each.startswith("__")]
    own = {name for name in found if name == "generate" or not _is_of_a_base(getattr(kind, name))}
    return own - {"forward"}


def _is_of_a_base(method: Any) -> bool:
    """Return whether a method is one that all models have: torch's own, or one of transformers' base classes."""
    return str(method.__module__).startswith(("torch.", "transformers.modeling_", "transformers.generation"))
