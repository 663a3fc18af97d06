"""torch process groups, which grids share: one for each set of ranks and each set of options.

The grids of eight ranks, however many and in whatever order their axes are, need seven different groups a rank.  An
idle group is not free: one of gloo has three threads that wake a hundred times a second, one of NCCL has buffers.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from ndtp.collectives.backends import backend_of
from ndtp.collectives.own_presence import presence
from ndtp.collectives.presence import Presence
from ndtp.collectives.torch_patches import in_place
from ndtp.errors import GridError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GROUPS: WeakValueDictionary[Hashable, ProcessGroup] = WeakValueDictionary()
# Whether a group is there must not depend on when a rank collects the last grid that had it: ranks make one together.
_KEPT: WeakKeyDictionary[ProcessGroup, set[ProcessGroup]] = WeakKeyDictionary()  # by the world, which ends them all
_ALONE: WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()  # by the world
DEFAULT_TIMEOUT_S = 120.0
TIMEOUT = "NDTP_TIMEOUT"  # of the environment: another default, in seconds
_START_UP_S = 5.0  # ranks may take so long to come together, whatever the timeout of the group
_LATE_S, _LOOK_S = 2.0, 0.1  # for torch to say itself that time is up; between looks whether a rank has left
_NAMES = "torch.distributed.distributed_c10d._world.pg_names"
_WORLD, _FAR = "torch.distributed.distributed_c10d._world", 2**40  # more groups than a world has
_ENDING: list[tuple[float, ProcessGroup]] = []  # and when, on the monotonic clock


def default_timeout() -> float:
    """Seconds after which a wait for a peer fails, of a grid that says nothing of it.

    Raises:
        GridError: the environment has something else than a number of seconds.
    """
    text = os.environ.get(TIMEOUT)
    try:
        seconds = DEFAULT_TIMEOUT_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= 1e9:
        raise GridError(f"{TIMEOUT}={text!r} is not a number of seconds from 0.001 to 1e+09\n  fix: {TIMEOUT}=120")
    return seconds


def shared_group(
    partition: Sequence[Sequence[int]],
    options: Hashable,
    alone: bool,
    arguments: Callable[[], dict[str, Any]],
    axes: Sequence[str] = (),
    keep: bool = True,
    timeout: float | None = None,
    split: bool = False,
) -> ProcessGroup:
    """The group that has this rank among those of `partition`, made unless it is there.

    A collective: of all ranks of the world, or `alone` of the group's members; they ask in one order.

    Args:
        partition: the members of each group that is made together with this one, as global ranks.
        options: what tells groups of the same ranks apart.
        arguments: gives those of `dist.new_group`, anew for every group: torch writes into NCCL's options.
        axes: of the grid for which it is made first, for torch's watchdog and flight recorder to name.
        keep: as long as the world lives; else its grid may `end` it.
        timeout: seconds that the ranks may take to come together, five at least.  Default: that of grids.
        split: take the world apart into all of `partition` by one call, where its backend can.
    """
    seconds = max(default_timeout() if timeout is None else timeout, _START_UP_S)
    key = (tuple(map(tuple, partition)), options, alone)
    _end_what_is_due()
    group = _GROUPS.get(key)
    if group is None or not _is_registered(group):
        here, make = presence(), partial(_shared_group, key, arguments, axes, keep, seconds, split)
        group = make() if here is None or not backend_of().runs_in_host else _breakable(make, here, seconds)
    return group


def _breakable(make: Callable[[], ProcessGroup], here: Presence, seconds: float) -> ProcessGroup:
    """Make a group in a thread, which is left behind when a rank has left or time is up.

    gloo waits for the connection of one rank after the other, for as long as the timeout each, whoever is gone
    meanwhile; a store of files has waits that nothing ends, either.

    Raises:
        RuntimeError: a rank has left, or time is up; or what `make` raises.
    """
    made: list[ProcessGroup] = []
    failed: list[BaseException] = []
    until, ended = time.monotonic() + seconds + _LATE_S, threading.Event()

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    with here.guarding(seconds):
        threading.Thread(target=work, name="ndtp group", daemon=True).start()
        while not ended.wait(_LOOK_S):
            if here.has_lost() or time.monotonic() > until:
                why = "connection closed, a rank has left" if here.has_lost() else f"timed out after {seconds:g} s"
                raise RuntimeError(f"ranks are not connected: {why}")
    if failed:
        raise failed[0]
    return made[0]


def _shared_group(
    key: tuple[Sequence[tuple[int, ...]], Hashable, bool],
    arguments: Callable[[], dict[str, Any]],
    axes: Sequence[str],
    keep: bool,
    seconds: float,
    split: bool,
) -> ProcessGroup:
    partition, _, alone = key
    description = "_".join(("ndtp", *axes, str(len(partition[0])), "ranks"))
    mine = next(i for i, ranks in enumerate(partition) if dist.get_rank() in ranks)
    naming: AbstractContextManager[None] = nullcontext()
    if (alone or split) and (world := dist.group.WORLD) is not None:  # which torch names by ranks, and by their number
        asked = _ALONE.setdefault(world, Counter())
        asked[partition[mine]] += 1
        _know_as_many(partition[mine], asked[partition[mine]], seconds)
        naming = _named_by(asked[partition[mine]])
    with naming:
        if split:
            given = {name: value for name, value in arguments().items() if name != "device_id"}  # that of the world
            group: Any = dist.split_group(
                split_ranks=[list(ranks) for ranks in partition], group_desc=description, **given
            )
        else:
            group = [
                dist.new_group(list(ranks), use_local_synchronization=alone, group_desc=description, **arguments())
                for ranks in partition
            ][mine]
    _GROUPS[key] = group
    if not keep:
        _meet(group, seconds)
    elif (world := dist.group.WORLD) is not None:
        _KEPT.setdefault(world, set()).add(group)
    return group


@contextmanager
def _named_by(number: int) -> Iterator[None]:
    """Let torch 2.15 name a group by how many its members have made alone; it names groups by how many a rank made."""
    known = in_place(_WORLD)
    before, known.group_count = known.group_count, _FAR + number
    try:
        yield
    finally:
        known.group_count = before  # others may not have made it, and count on together


def _know_as_many(members: tuple[int, ...], number: int, seconds: float) -> None:
    """Let the members of a group that they are to make alone know of equally many groups; they come here together.

    torch names such a group by its ranks and by how many groups there are.  Ranks that are in different numbers of them
    (of grids of other ranks, of the user's own) would wait for each other under different names, and for ever.

    Args:
        number: how many they have made alone, this one among them.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    if len(members) == 1 or not backend_of().has_peers:
        return
    names: dict[object, str] = in_place(_NAMES)
    store, key = _get_default_store(), f"ndtp/alone/{'_'.join(map(str, members))}/{number}"
    store.set(f"{key}/{dist.get_rank()}", str(len(names)))
    store.wait([f"{key}/{member}" for member in members], timedelta(seconds=seconds))
    most = max(int(store.get(f"{key}/{member}")) for member in members)
    if store.add(f"{key}/read", 1) == len(members):  # another world may have the same store
        for each in (*members, "read"):
            store.delete_key(f"{key}/{each}")
    while len(names) < most:
        names[_Ended()] = f"ndtp passed over {len(names)}"


def _meet(group: ProcessGroup, seconds: float) -> None:
    """Return when all members have connected: one that ends the group before would cut the others off."""
    from torch.distributed.distributed_c10d import _world

    if not backend_of(group).has_peers:
        return
    store = _world.pg_map[group][1]
    if store.add("ndtp/connected", 1) == group.size():
        store.set("ndtp/all connected", "")
    store.wait(["ndtp/all connected"], timedelta(seconds=seconds))


def end(group: ProcessGroup, patience_s: float = 0.0) -> None:
    """Take a group of gloo from torch's registries: its threads and descriptors go with the last reference to it.

    Without a word to its peers, who may do so earlier, later or never: what was sent to them arrives all the same.

    Args:
        patience_s: do so no earlier than in so many seconds, when a grid comes or goes: something was given up
            unfinished, and peers may still come for it.
    """
    _ENDING.append((time.monotonic() + patience_s, group))
    _end_what_is_due()


def _end_what_is_due() -> None:
    now = time.monotonic()
    due = [entry for entry in _ENDING if entry[0] <= now]
    for entry in due:
        _ENDING.remove(entry)
        _end(entry[1])


def _end(group: ProcessGroup) -> None:
    if not _is_registered(group):  # the world has ended before
        return
    names: dict[object, str] = in_place(_NAMES)
    name = names[group]
    dist.destroy_process_group(group)
    # torch names a group that its members alone make by how many groups they have.  Ranks on which this one has ended
    # and ranks on which it has not yet must find the same name, and never one that was used before.
    names[_Ended()] = name


class _Ended:
    """Counts for a group that is gone, or that others have, among the names of torch's groups."""

    def shutdown(self) -> None:
        """Called when the world ends."""

    abort = shutdown


def never_destroy() -> None:
    """Keep all groups until the process is gone: for a rank that fails.

    A group of gloo that is destroyed waits for its collectives to end, and thereby for ranks that may never come; the
    launcher stops those when this one has ended.
    """
    for group in {dist.group.WORLD, *_GROUPS.values()}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def let_go_of_world() -> None:
    """Have torch's functions hold on to the world no longer than `destroy_process_group` says.

    `torch.distributed.nn`, which DTensor imports, has the world of that moment as the default of arguments.  Held by
    these, gloo's threads outlive the interpreter, and abort a program now and then.  Imported early it has None there.
    """
    functional, world = sys.modules.get("torch.distributed.nn.functional"), dist.group.WORLD
    for function in vars(functional).values() if functional and world else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(each is world for each in defaults):
            function.__defaults__ = tuple(None if each is world else each for each in defaults)


def _is_registered(group: ProcessGroup) -> bool:
    """Return whether torch knows the group, which it does not after `destroy_process_group`."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True
