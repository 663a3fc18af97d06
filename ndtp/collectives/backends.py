"""The communication backends of torch that ndtp knows: one record each, in which everything else looks up what to do.

A backend is added by a record here.  Where torch's own collectives are not used as they are, `ndtp.collectives.movers`
names the class that moves the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ndtp.collectives import nccl
from ndtp.collectives.buffer_ring import Allocate


@dataclass(frozen=True)
class Backend:
    """The record of a communication backend: all that a grid needs to know of it.

    Attributes:
        name: the name that torch has for it.
        device_type: the devices that it is made for; None if it is made for none.
        has_peers: whether messages reach another process.
        runs_in_host: whether threads of the host run its collectives.  They share processors with products, no graph
            of a device holds them, a group connects to one rank after the other, and a rank may end a group alone.
        takes_multiprocessors: whether its collectives are kernels that hold multiprocessors of the device, which
            `max_ctas` limits, and whose memory `register_buffers` takes.
        groups_per_axis: the number of process groups that an axis has where the whole world is one grid.
        sums_sparse: whether it adds up sparse tensors.
    """

    name: str
    device_type: str | None = None
    has_peers: bool = True
    runs_in_host: bool = False
    takes_multiprocessors: bool = False
    groups_per_axis: int = 1
    sums_sparse: bool = False

    def prepare(self) -> None:
        """Set what the backend reads before its first group is made."""

    def can_group_alone(self) -> bool:
        """Return whether some ranks can make a group while others do not take part."""
        return True

    def can_split(self) -> bool:
        """Return whether one call makes the groups of all ranks along an axis, out of the world's."""
        return False

    def group_arguments(self, seconds: float, high_priority: bool, max_ctas: int | None) -> dict[str, object]:
        """The arguments of `dist.new_group` for a group whose waits fail after some seconds."""
        return {"timeout": timedelta(seconds=seconds)}

    def multiprocessors(self) -> int:
        """Return the number of multiprocessors of this rank's device, of which the collectives take some."""
        return 0

    def registered_memory(self, groups: Iterable[dist.ProcessGroup]) -> Allocate | None:
        """Memory that the groups send from without a copy; None where they have none."""
        return None


class _Nccl(Backend):
    def prepare(self) -> None:
        nccl.keep_order()

    def can_group_alone(self) -> bool:
        return nccl.can_group_alone()

    def can_split(self) -> bool:
        return nccl.can_split()

    def group_arguments(self, seconds: float, high_priority: bool, max_ctas: int | None) -> dict[str, object]:
        return nccl.group_arguments(seconds, high_priority, max_ctas)

    def multiprocessors(self) -> int:
        return nccl.multiprocessors()

    def registered_memory(self, groups: Iterable[dist.ProcessGroup]) -> Allocate | None:
        return nccl.registered_memory(groups)


GLOO = Backend("gloo", device_type="cpu", runs_in_host=True, sums_sparse=True)
NCCL = _Nccl("nccl", device_type="cuda", takes_multiprocessors=True, groups_per_axis=2)
FAKE = Backend("fake", has_peers=False)
NOBODY = Backend("")  # of a grid of one rank
KNOWN = {each.name: each for each in (GLOO, NCCL, FAKE)}
MOVING = tuple(each.name for each in KNOWN.values() if each.has_peers)


def backend_named(name: str | None) -> Backend:
    """The record of a backend; one that ndtp does not know moves tensors by torch's own collectives."""
    return NOBODY if name is None else KNOWN.get(name) or Backend(name)


def backend_of(group: dist.ProcessGroup | None = None) -> Backend:
    """The record of the backend of a process group; default: the world's."""
    return backend_named(dist.get_backend(group))


def backends_by_device() -> dict[str, str]:
    """Device type -> the name of the backend of the default process group.

    `dist.get_backend` says "undefined" after an `init_process_group` that names none.
    """
    return dict(entry.split(":") for entry in dist.get_backend_config().split(",") if ":" in entry)


def backends_of_host() -> str:
    """The argument of `init_process_group` for the devices that this machine has."""
    return f"cpu:{GLOO.name},cuda:{NCCL.name}" if torch.cuda.is_available() else GLOO.name


def device_type_of(backends: Mapping[str, str]) -> str:
    """The devices that a grid takes: torch's default device, where the user set one that a backend serves.

    A grid of one rank without backends takes any default device but meta.  Else they are those of a backend that is
    made for others than CPUs, if there is one.
    """
    chosen = torch.get_default_device().type
    if chosen not in ("cpu", "meta") and (chosen in backends or not backends):
        return chosen
    made_for = [backend_named(name).device_type for name in backends.values()]
    return next((device_type for device_type in made_for if device_type not in (None, "cpu")), None) or "cpu"
