"""Collectives of a user's code that take ranks which have the same rows for ranks with rows of their own.

A loss outside of the model may gather over all ranks.  While a model's own code runs, its collectives find the ranks
that have other rows (`ndtp.runtime.default_group`).  Elsewhere a group is what the code says, and some of its ranks may
have the same rows.  A split tensor tells that itself.  Of a plain one, as the functions of a recognised model's hidden
states give it, the number of rows tells that they may be the model's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ndtp.collectives.torch_patches import replaced
from ndtp.errors import warn
from ndtp.runtime.at_work import AT_WORK, at_work
from ndtp.runtime.grid_like import GridLike
from ndtp.split.tensor import name_of

# By what they do with a row that several ranks have: it is there several times, or counts several times.
_TAKING_ROWS = {
    "all_gather", "all_gather_single", "all_gather_into_tensor", "gather", "all_reduce", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
}  # fmt: skip
_GATHERING = {"all_gather", "all_gather_single", "all_gather_into_tensor", "gather"}
_TOLD: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()  # by grid: the collectives that were warned of


@contextmanager
def given_whole(x: Any, func: object, args: Sequence[Any] = ()) -> Iterator[None]:
    """A context in which a function runs that got the whole of a split tensor."""
    if "_c10d_functional" in getattr(func, "_qualified_op_name", "") and name_of(func) in _TAKING_ROWS:
        _look(name_of(func), _resolve_process_group(args[-1]), *x.rows_differ)
    AT_WORK.gathered.append(x.rows_differ)
    try:
        yield
    finally:
        AT_WORK.gathered.pop()


def note_rows(mesh: GridLike, axes: Sequence[str], given: object) -> None:
    """Note how many rows the results of a model have, for a loss outside of it that gathers what it makes of them.

    Args:
        axes: along which ranks have rows of their own.
        given: what the model's code has returned.
    """
    if mesh.global_ranks is None:
        return
    guard_rows()
    results = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else (given,)
    for rows in {x.shape[0] for x in results if isinstance(x, Tensor) and x.dim() > 1}:
        AT_WORK.given.append((ref(mesh), tuple(axes), rows))


@functools.cache
def guard_rows() -> None:
    """Look at the group of each collective that code calls with such a tensor."""
    replaced("torch.distributed.distributed_c10d._check_single_tensor", _looking)


def _looking(given: Callable[..., Any]) -> Callable[..., Any]:
    def check(param: Any, param_name: str, *rest: Any) -> Any:
        if AT_WORK.gathered:
            frame = sys._getframe(1)
            adds = frame.f_locals.get("op") in (None, dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT)
            if frame.f_code.co_name in _TAKING_ROWS and adds:
                _look(frame.f_code.co_name, frame.f_locals.get("group"), *AT_WORK.gathered[-1])
        elif AT_WORK.given and not AT_WORK.models and not param_name.startswith("output"):
            frame = sys._getframe(1)
            is_given = isinstance(param, Tensor) and param.dim() > 1 and param.is_floating_point()
            if is_given and frame.f_code.co_name in _GATHERING:
                _look_at_rows(param.shape[0], frame.f_code.co_name, frame.f_locals.get("group"))
        return given(param, param_name, *rest)

    return check


def _look_at_rows(rows: int, name: str, group: object) -> None:
    """Warn where the last model whose results had so many rows, or had them in several calls, joined, shares these."""
    for mesh_of, axes, count in reversed(AT_WORK.given):
        if rows == count or (count > 1 and rows % count == 0):
            if (mesh := mesh_of()) is not None:
                _look(name, group, mesh, axes)
            return


def _look(name: str, group: Any, mesh: Any, axes: Sequence[str]) -> None:
    """Warn, once for each grid and function, where ranks of a group have the same rows.

    Args:
        group: None: the default one.
        axes: along which ranks have rows of their own.
    """
    told = _TOLD.setdefault(mesh, set())
    if (group is None and at_work() is not None) or name in told or mesh.global_ranks is None:
        return
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    here = [mesh.grid.coordinate(i) for i, rank in enumerate(mesh.global_ranks) if rank in set(members)]
    times = len(here) // max(1, len({tuple(each[axis] for axis in axes) for each in here}))
    if times > 1:
        told.add(name)
        alike = " ".join(axis for axis in mesh.grid.nontrivial(tuple(mesh.grid)) if axis not in axes)
        fix = f"group=mesh.group({tuple(axes)!r})" if axes else "without this collective, as every rank has all rows"
        warn(
            f"ndtp: {name} over {len(members)} ranks takes rows of a split model {times} times: ranks that differ "
            f"along {alike} of grid {mesh.grid} have the same ones\n  fix: {fix}; in the model's own forward ndtp "
            "takes the ranks that have other rows"
        )
