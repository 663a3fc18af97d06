"""NCCL for a `ProcessGrid`: options of its communicators, and memory that they know."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from ndtp.collectives.buffer_ring import Allocate
from ndtp.errors import GridError, warn

ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def device() -> torch.device:
    """The GPU of this rank: the one that `init_process_group` was told, else the current one."""
    return _bound_device() or torch.device("cuda", torch.cuda.current_device())


def multiprocessors() -> int:
    """Return the number of multiprocessors of this rank's GPU."""
    return int(torch.cuda.get_device_properties(device()).multi_processor_count)


def was_started() -> bool:
    """Return whether this process has a communicator already, of the world or of any other group.

    One is made at once with the world that was told its device, else with a group's first collective.
    """
    return _bound_device() is not None or any(
        backend._is_initialized() for backend in map(_nccl_of, list(_world.pg_map)) if backend is not None
    )


@cache
def keep_order() -> None:
    """Have NCCL execute operations of different communicators in the order in which they are issued.

    Before the first communicator is made: NCCL reads its environment once.  `import ndtp` sets it, too, where
    torch.distributed has not been initialised.  Where NCCL cannot keep the order, it is said once.
    """
    version, cuda = torch.cuda.nccl.version(), torch.version.cuda or "0.0"  # type: ignore[no-untyped-call]
    if ORDER not in os.environ and was_started():
        why = f"NCCL was started before ndtp was imported, without {ORDER}=1"
    elif os.environ.setdefault(ORDER, "1") != "1":  # as the user wants it
        return
    elif version < (2, 26) or tuple(map(int, cuda.split(".")[:2])) < (12, 3):
        why = f"NCCL {'.'.join(map(str, version))} with CUDA {cuda} does not keep it (2.26 with 12.3 does)"
    else:
        return
    warn(
        f"ndtp: collectives of several communicators may execute in another order than they are issued: {why}; "
        f"max_ctas keeps them from filling the device\n  fix: import ndtp before init_process_group, with a new NCCL"
    )


def group_arguments(timeout: float | None, high_priority: bool, max_ctas: int | None) -> dict[str, object]:
    """Arguments of `dist.new_group`: options, and the device, by which the communicator is made at once.

    A communicator that is made at its first collective would be made in the middle of a schedule.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    limit = None if timeout is None else timedelta(seconds=timeout)
    if limit is not None:
        # torch takes the argument, and warns of every group whose options say something else: their default does.
        options._timeout = limit
    return {"pg_options": options, "device_id": device(), "timeout": limit}


def can_group_alone() -> bool:
    """Return whether some ranks can make a group while others do not take part.

    After `init_process_group(device_id=...)` torch splits the communicator of the world, which takes all of its ranks.
    """
    return _bound_device() is None


def can_split() -> bool:
    """Return whether the world's communicator is there and can be taken apart along an axis, in one call."""
    if _bound_device() is None or set(dist.get_backend_config().split(",")) != {"cuda:nccl"}:
        return False  # gloo beside it could not be split with torch 2.11
    return bool(dist.group.WORLD._get_backend(device()).supports_splitting)  # type: ignore[union-attr]


def registered_memory(groups: Iterable[dist.ProcessGroup]) -> Allocate:
    """Memory from `ncclMemAlloc` that is registered with all of these groups, for NCCL to send from without a copy.

    Raises:
        GridError: the device cannot.
    """
    gpu, groups = device(), list(groups)
    backends: list[Any] = [group._get_backend(gpu) for group in groups]
    if not all(backend.supports_tensor_alloc(gpu) for backend in backends):
        raise GridError(
            f"ProcessGrid: register_buffers=True, but NCCL cannot register memory on {gpu}: it needs NCCL 2.19 and a "
            "device with multicast (NVSwitch)\n  fix: register_buffers=False"
        )
    for group in groups:  # torch makes communicators behind the host's back, and waits for one at its first collective
        dist.all_reduce(torch.zeros(1, device=gpu), group=group)
    with torch.cuda.device(gpu):
        pool = torch.cuda.MemPool(backends[0].mem_allocator)
    for backend in backends:
        backend.register_mem_pool(pool)  # what is allocated from it later is registered too

    def allocate(num_bytes: int, on: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool, gpu):
            return torch.empty(num_bytes, dtype=torch.uint8, device=on)

    return allocate


def _nccl_of(group: dist.ProcessGroup) -> Any:
    """The part of a group that is NCCL's; None where it has none."""
    gpu = torch.device("cuda")
    backend = group._get_backend(gpu) if gpu in group._device_types else None
    return backend if hasattr(backend, "_is_initialized") else None


def _bound_device() -> torch.device | None:
    return dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
