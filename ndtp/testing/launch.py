"""`run`: a function on local ranks, wherever the caller is."""

from __future__ import annotations

import atexit
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ndtp.collectives.backends import backend_of, backends_of_host
from ndtp.collectives.fresh_store import meet_afresh
from ndtp.collectives.groups import default_timeout, never_destroy
from ndtp.collectives.last_words import tell_of
from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.testing.messages import IMPORTING_MAIN, called, dumps_result
from ndtp.testing.pool import shared_pool
from ndtp.testing.rank_error import RankError


def run(
    fn: Callable[..., Any],
    ranks: int = 8,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
    axes: Mapping[str, int] | None = None,
    wait_all: bool = False,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `ranks` local gloo ranks and return the results by rank.

    The ranks are started at the first call of the process and reused.  In a program that already is one of `ranks`
    ranks (under torchrun, or after `init_process_group`), `fn` runs in place, in that group, and every rank gets all
    results; `timeout` and `wait_all` are then the launcher's business.  A group that is made for it is destroyed when
    the program ends, unless `fn` failed.

    Args:
        fn: a function that can be imported by its name: at module level, of a module or of the main script.
        timeout: seconds.
        axes: axis sizes, slowest first, so that errors can name the failing rank's coordinates.
        wait_all: after a failure, wait for all ranks to finish or fail, instead of half a second.

    Raises:
        ValueError: `fn` cannot be imported, or an argument not pickled, by another process; or the program is part of
            a group of another size.
        RankTimeout: the timeout passed; names the ranks still running, and where.
        RankError: a rank raised or died; carries its traceback.
    """
    __tracebackhide__ = True
    world_size = _world_size()
    if world_size is None or IMPORTING_MAIN.get():
        return shared_pool(ranks).call(fn, args, kwargs, timeout=timeout, axes=axes, wait_all=wait_all)
    if world_size != ranks:
        raise ValueError(
            f"run: {ranks} ranks were asked for in a program that is one of {world_size}\n"
            f"  fix: ranks={world_size}, or start the program as a single process"
        )
    return _run_in_place(fn, tuple(args), dict(kwargs or {}), axes)


def is_one_of_many() -> bool:
    """Whether this process is one of the ranks of a launcher, or of a group that was made: `run` runs in place then."""
    return _world_size() is not None


def _world_size() -> int | None:
    """Size of the group that this process is part of; None for a process of its own."""
    if dist.is_available() and dist.is_initialized():
        # One rank, or a fake group of many: no other process is there to run anything.
        single = dist.get_world_size() == 1 or not backend_of().has_peers
        return None if single else dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return None


def _run_in_place(
    fn: Callable[..., object], args: Arguments, kwargs: Keywords, axes: Mapping[str, int] | None
) -> list[object]:
    if not dist.is_initialized():
        limit = timedelta(seconds=default_timeout())
        meet_afresh()
        dist.init_process_group(backends_of_host(), timeout=limit)
        atexit.register(_leave_group)
    rank = dist.get_rank()
    try:
        result = dumps_result(called(fn, args, kwargs))
    except BaseException as error:
        error = tell_of(error)
        never_destroy()
        if not isinstance(error, Exception):
            raise
        # Not gathered: other ranks may hang in a collective of fn.  The launcher stops them when this one exits.
        raise RankError(
            rank,
            {rank: "".join(traceback.format_exception(error))},
            axes=axes,
            exceptions={rank: error},
            summaries={rank: f"{type(error).__name__}: {error}"},
        ) from error
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    return [pickle.loads(result) for result in results]


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
