"""Collectives as NCCL runs them: a stream for each group, which waits for the current one, and works to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.collectives.backends import backend_of
from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.testing.cuda.graph import tensors_of
from ndtp.testing.cuda.order import Lane, Snapshot

# Methods of a process group: how many of their arguments they write to, and how many more they read.
METHODS = {
    "_allgather_base": (1, 1), "allgather": (1, 1), "allgather_into_tensor_coalesced": (1, 1),
    "_reduce_scatter_base": (1, 1), "reduce_scatter": (1, 1), "reduce_scatter_tensor_coalesced": (1, 1),
    "alltoall_base": (1, 1), "alltoall": (1, 1), "allreduce": (1, 0), "allreduce_coalesced": (1, 0),
    "broadcast": (1, 0), "reduce": (1, 0), "gather": (1, 1), "scatter": (1, 1), "send": (0, 1), "recv": (1, 0),
}  # fmt: skip
_SUMS = ("allreduce", "allreduce_coalesced", "reduce", "broadcast")
BACKEND = "cuda_stand_in"


class WorkStandIn:
    """The result of starting a collective: waiting for it blocks the current stream, not the host."""

    def __init__(self, owner: Communication, what: str, lane: Lane) -> None:
        self.what, self._owner, self._at, self._real = what, owner, Snapshot(lane), None
        owner.waiting[id(self)] = what

    def wait(self, timeout: Any = None) -> bool:
        """See torch."""
        lane = self._owner.machine.current_stream().lane
        lane.wait(self._at.clock, self._at.capture, self.what)
        self._owner.waiting.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        """See torch; a stand-in's work is never done before the host waited for it."""
        return False

    def synchronize(self) -> None:
        """See torch."""
        self.wait()


class Communication:
    """The collectives of a `RecordedCuda`.

    Attributes:
        waiting: works that nobody has waited for, by identity.
    """

    def __init__(self, owner: Any) -> None:
        self.machine, self.waiting = owner, dict[int, str]()
        self._lanes: WeakKeyDictionary[Any, Lane] = WeakKeyDictionary()
        self._made: list[Lane] = []
        self._members: dict[int, tuple[int, ...]] = {}
        self._functional: dict[int, tuple[WorkStandIn, Any]] = {}
        self._local = threading.local()

    @property
    def is_sending(self) -> bool:
        """Whether this thread is inside of a real collective, which plays one operation."""
        return getattr(self._local, "is_sending", False)

    def lanes(self) -> list[Lane]:
        return self._made

    def lane_of(self, group: Any) -> Lane:
        """The stream of a group, which has one for each."""
        lane = self._lanes.get(group)
        if lane is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            lane = Lane(f"communicator {len(self._made) + 1} of ranks {','.join(map(str, ranks))}")
            self._lanes[group], self._members[lane.number] = lane, ranks
            self._made.append(lane)
        return lane

    def members_of(self, lane: Lane) -> tuple[int, ...] | None:
        """Return the ranks of the communicator whose lane it is; None for a stream."""
        return self._members.get(lane.number)

    def send(
        self,
        group: Any,
        what: str,
        run: Callable[..., Any],
        args: Arguments,
        writes: Iterable[Tensor],
        reads: Iterable[Tensor],
    ) -> WorkStandIn:
        """Enqueue a collective on the stream of its group, and run it."""
        machine, lane = self.machine, self.lane_of(group)
        lane.wait_lane(machine.current_stream().lane)
        machine.launch(what, reads, writes, lane)
        work = WorkStandIn(self, f"{what} on {lane.name}", lane)
        self._local.is_sending = True
        try:
            run(*args)
        finally:
            self._local.is_sending = False
        if machine.capture is not None:
            machine.capture.add(what, run, args, {}, [], machine.block_of, set())
        return work

    def functional(self, func: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Enqueue a functional collective, whose result is waited for by `wait_tensor`."""
        name, machine = func.overloadpacket.__name__, self.machine
        given = tensors_of(args)
        if name == "wait_tensor":
            found = self._functional.pop(given[0].untyped_storage()._cdata, None)
            if found is not None:
                found[0].wait()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if name.startswith("_wrap") or not isinstance(args[-1], str):
            return result
        from torch.distributed.distributed_c10d import _resolve_process_group

        results = tensors_of(result)
        known = {x.untyped_storage()._cdata for x in given}
        made = {i for i, x in enumerate(results) if x.untyped_storage()._cdata not in known}
        for i in made:
            machine.made(results[i], name)
        lane = self.lane_of(_resolve_process_group(args[-1]))  # type: ignore[arg-type]
        lane.wait_lane(machine.current_stream().lane)
        machine.launch(name, given, results, lane)
        work = WorkStandIn(self, f"{name} on {lane.name}", lane)
        for x in results:
            self._functional[x.untyped_storage()._cdata] = work, (x, given)  # torch holds them until then
        if machine.capture is not None:

            def again(*given: Any) -> Any:
                sent = func(*given)
                return [torch.ops._c10d_functional.wait_tensor(x) for x in tensors_of(sent)]

            machine.capture.add(name, again, args, {}, results, machine.block_of, made)
        return result

    def unjoined(self) -> list[str]:
        """Return the works that no stream has waited for."""
        return [f"nobody waited for {what}" for what in self.waiting.values()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the methods of process groups recorded, for groups of other backends than gloo's."""
        with ExitStack() as stack:
            for name, counts in METHODS.items():
                real = getattr(dist.ProcessGroup, name, None)
                if real is not None:
                    stack.enter_context(mock.patch.object(dist.ProcessGroup, name, self._method(name, real, *counts)))
            yield

    def _method(self, name: str, real: Any, written: int, read: int) -> Any:
        communication = self

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            if backend_of(group).runs_in_host:
                return real(group, *args, **kwargs)

            def run(*tensors: Any) -> None:
                with torch.no_grad():
                    done = real(group, *tensors, *rest, **kwargs)
                if done is not None and backend_of(group).has_peers:
                    done.wait()

            sent, rest = args[: written + read], args[written + read :]
            writes = tensors_of(sent[:written])
            reads = tensors_of(sent[written:]) + (writes if name in _SUMS else [])
            return communication.send(group, name, run, sent, writes, reads)

        return method


def register_backend() -> str:
    """Know a backend that moves tensors of CPUs as gloo does, and that ndtp takes for one with streams.

        dist.init_process_group(ndtp.testing.cuda.works.register_backend(), ...)

    Returns:
        the name of the backend.
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _gloo, devices=["cpu"])
    return BACKEND


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> object:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


__all__ = ["BACKEND", "Communication", "WorkStandIn", "register_backend"]
