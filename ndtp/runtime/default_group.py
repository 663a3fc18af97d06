"""The default process group of `torch.distributed`, as the code of a split model sees it: ranks that have other rows.

A model's own code may gather over all ranks, say for a contrastive loss, and takes each for one that has rows of its
own.  On a grid the ranks along the tensor axes have the same rows.  So while a split model runs, the calls of its own
code that name no group, or the world, act on the group along the data axes; without such axes it is this rank alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ndtp.collectives.groups import shared_group
from ndtp.collectives.torch_patches import replaced
from ndtp.runtime.at_work import AT_WORK
from ndtp.runtime.process_grid import ProcessGrid

_BETWEEN = ("ndtp.split", "contextlib", "functools", "torch.overrides", "torch.utils._contextlib")
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.distributed.nn")
_OURS = ("ndtp.", "torch.")
_USERS = ("torch.nn.modules",)  # SyncBatchNorm


class OwnRows:
    """The ranks that have other rows than this one, for the code of one model.

    Args:
        axes: of the grid, along which ranks have rows of their own.
        name: of the model.

    Attributes:
        called: the first collective that the code has called.
        has_asked: whether it has asked how many ranks take part.
    """

    def __init__(self, mesh: ProcessGrid, axes: Sequence[str], name: str) -> None:
        self.mesh, self.axes, self.name = mesh, mesh.grid.nontrivial(tuple(axes)), name
        self.called, self.has_asked, self._is_told = "", False, False
        guard_default_group()

    @property
    def group(self) -> Any:
        """The process group of these ranks, this one among them; a collective at the first call."""
        if self.axes:
            return self.mesh.group(self.axes)
        alone = ((_world_rank(),),)
        return shared_group(alone, "alone with its rows", True, dict)

    def begin(self, *_: Any) -> None:
        """Say that the code of the model runs in this thread from now on, until `end`."""
        if self.mesh.global_ranks is not None and not torch.compiler.is_compiling():  # of a dry run there are none
            AT_WORK.models.append(self)

    def end(self, *_: object) -> None:
        if AT_WORK.models and AT_WORK.models[-1] is self:
            AT_WORK.models.pop()
        if self.called and not self.has_asked and not self._is_told:
            self._tell()

    def _tell(self) -> None:
        """Warn, once, of code that may have noted the number of all ranks when the model was made."""
        self._is_told, (few, many) = True, (self.group.size(), dist.group.WORLD.size())  # type: ignore[union-attr]
        if few < many:
            warnings.warn(
                f"ndtp: the code of '{self.name}' calls {self.called} and does not ask how many ranks take part.  In a "
                f"split model these are the ranks that have other rows, {few} of {many}; a number that the model noted "
                "when it was made is another one\n  fix: dist.get_world_size() in forward, or a group of your own",
                stacklevel=1,  # whoever calls, so that Python tells it once
            )

    @contextmanager
    def while_running(self) -> Iterator[None]:
        """A context in which the model's code runs."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def watch(self, model: nn.Module) -> None:
        """Put `begin` and `end` around the forward of a model."""
        model.register_forward_pre_hook(self.begin, prepend=True)
        model.register_forward_hook(self.end, always_call=True)


def _world_rank() -> int:
    rank: int = dist.group.WORLD.rank()  # type: ignore[union-attr]
    return rank


def uses() -> int:
    """Count how often code of models has asked for its group in this thread."""
    return AT_WORK.asked


def guard_default_group() -> None:
    """Put this module's functions in front of those by which torch finds a group."""
    replaced("torch.distributed.distributed_c10d._get_default_group", _own_default_group)
    replaced("torch.distributed.distributed_c10d._canonicalize_group_rank", _own_group_rank)


def _own_default_group(given: Callable[[], object]) -> Callable[[], object]:
    def _get_default_group() -> object:
        rows = _asked_for() if AT_WORK.models else None
        return given() if rows is None else rows

    return _get_default_group


def _own_group_rank(given: Callable[..., object]) -> Callable[..., object]:
    """A rank among those that have other rows is its place among them, by whatever argument it is given."""

    def _canonicalize_group_rank(
        group: object, global_rank: object = None, group_rank: object = None, *rest: object, **ways: object
    ) -> object:
        if AT_WORK.models and group is _asked_for() and (global_rank is None) != (group_rank is None):
            return global_rank if group_rank is None else group_rank
        return given(group, global_rank, group_rank, *rest, **ways)

    return _canonicalize_group_rank


def _asked_for() -> object:
    """The group of rows, if code of a model calls a function of `torch.distributed` without another group."""
    frame, first, is_torch_nn, functions = sys._getframe(2), None, False, list[str]()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_COLLECTIVES):
            code = frame.f_code
            if "group" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                first = frame
                functions.append(code.co_name)
            is_torch_nn |= name.startswith("torch.distributed.nn")
        elif not name.startswith(_BETWEEN) and not isinstance(frame.f_locals.get("self"), TorchFunctionMode):
            break
        frame = frame.f_back  # type: ignore[assignment]
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    is_users = is_torch_nn or not name.startswith(_OURS) or name.startswith(_USERS)
    if first is None or not is_users:
        return None
    given, group = first.f_locals.get("group"), AT_WORK.models[-1].group
    if given is not None and given is not dist.group.WORLD and given is not group:
        return None
    AT_WORK.asked += 1
    rows = AT_WORK.models[-1]
    rows.has_asked |= functions[-1] == "get_world_size"
    rows.called = rows.called or next(filter(_is_collective, functions), "")
    return group


def _is_collective(function: str) -> bool:
    return not function.startswith(("_", "get_")) and function not in ("forward", "backward", "barrier")
