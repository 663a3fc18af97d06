"""The options of a `ProcessGrid`, checked before a group is made: what is refused is refused on every rank alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from ndtp.algebra.grid import Grid
from ndtp.algebra.wire import Wire
from ndtp.collectives.backends import NOBODY, backend_named, device_type_of
from ndtp.collectives.buffer_ring import DEFAULT_BYTES
from ndtp.collectives.thread_blocks import ThreadBlocks, ctas_that_fit, num_axes, quarter_of
from ndtp.compute.carved_gemm import CarvedGemm, can_carve_out
from ndtp.compute.gemm import KernelGemm, TorchGemm
from ndtp.errors import GridError

GEMMS = ("torch", "kernels")
MOVERS = ("torch", "symmetric")
SUMS = ("torch", "fp32")
SHORTEST_TIMEOUT_S = 0.001  # torch counts milliseconds: of less remains 0, with which gloo fails at once, or not
LONGEST_TIMEOUT_S = 1e9  # added to the clock in nanoseconds, a longer one ends in the past


@dataclass(frozen=True)
class GridOptions:
    """The options of a `ProcessGrid`, all in one record; `ProcessGrid` says what each of them means.

    Attributes:
        others: communicators that are busy beside those of the grid.
        thread_blocks: of each communicator, where `max_ctas` is the default; None where all have `max_ctas`.

    Raises:
        GridError: an option has a value that makes no sense on any backend; names the option and its value.
    """

    timeout: float | None = None
    check: bool | None = None
    gemm: str = "torch"
    collectives: str = "torch"
    sums: str = "torch"
    free_sms: int | None = None
    device_type: str | None = None
    groups_per_axis: int | None = None
    high_priority: bool = True
    max_ctas: int | None = None
    ring_bytes: int = DEFAULT_BYTES
    register_buffers: bool = False
    wire: Wire | None = None
    others: int = 0
    thread_blocks: ThreadBlocks | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", checked_timeout(self.timeout))
        if self.check is not None and not isinstance(self.check, bool):
            raise GridError(f"ProcessGrid: check={self.check!r} is neither True nor False, nor None")
        for name in ("high_priority", "register_buffers"):
            if not isinstance(flag := getattr(self, name), bool):
                raise GridError(f"ProcessGrid: {name}={flag!r} is neither True nor False")
        for name, known in (("gemm", GEMMS), ("collectives", MOVERS), ("sums", SUMS)):
            if (value := getattr(self, name)) not in known:
                raise GridError(f"ProcessGrid: {name}={value!r} is not one of {', '.join(known)}")
        groups = self.groups_per_axis
        if groups is not None and (isinstance(groups, bool) or groups not in (1, 2)):
            raise GridError(f"ProcessGrid: groups_per_axis={groups!r} is neither 1 nor 2")
        if self.free_sms is not None:
            _check_count("free_sms", self.free_sms, 0)
        _check_count("ring_bytes", self.ring_bytes, 0)
        if self.max_ctas is not None:
            _check_count("max_ctas", self.max_ctas, 1)

    @classmethod
    def of(
        cls,
        *,
        wire: Wire | str | Mapping[str, str | bool | None] | None = None,
        recipe: str | None = None,
        **options: Any,
    ) -> GridOptions:
        """The options that the keyword arguments of a `ProcessGrid` give."""
        return cls(wire=Wire.of(wire, recipe), **options)

    def on(self, backends: Mapping[str, str] | None, grid: Grid) -> GridOptions:
        """Return the options with the defaults that the process groups of a grid give.

        Args:
            backends: device type -> backend; None for a grid of one rank, which communicates with nobody.

        Raises:
            GridError: a device that no backend serves, or an option that the backend does not have.
        """
        device_type = self.device_type
        if device_type is None:
            device_type = device_type_of(backends or {})
        _check_device_type(device_type, backends)
        backend = backend_named((backends or {}).get(device_type))
        for name in ("max_ctas", "register_buffers"):
            if (value := getattr(self, name)) and not backend.takes_multiprocessors and backend is not NOBODY:
                raise GridError(
                    f"ProcessGrid: {name}={value} is an option of NCCL, the backend is {backend.name}\n"
                    "  fix: leave it out"
                )
        _check_free_sms(self.free_sms, self.gemm, device_type)
        settled = replace(self, device_type=device_type)
        if backend.takes_multiprocessors and self.max_ctas is None:
            return settled.dividing(backend.multiprocessors(), grid)
        return settled

    def dividing(self, multiprocessors: int, grid: Grid) -> GridOptions:
        """Return the options with a quarter of a device divided among the communicators of a grid."""
        per_axis = (self.groups_per_axis or 2) + (self.timeout is not None)  # and one for what DTensor sends
        each = ctas_that_fit(multiprocessors, per_axis, grid, self.others)
        own = max(1, quarter_of(multiprocessors) - self.others * each)
        return replace(self, max_ctas=each, thread_blocks=ThreadBlocks(each, per_axis * num_axes(grid), own))


def checked_timeout(timeout: object) -> float | None:
    """`timeout` as seconds.

    Raises:
        GridError: it is not a number of seconds between a millisecond and 1e9 s (31 years).
    """
    if timeout is None:
        return None
    seconds = float(timeout) if isinstance(timeout, Real) and not isinstance(timeout, bool) else math.nan
    if not SHORTEST_TIMEOUT_S <= seconds <= LONGEST_TIMEOUT_S:
        raise GridError(
            f"ProcessGrid: timeout={timeout!r} is not a number of seconds from {SHORTEST_TIMEOUT_S} to "
            f"{LONGEST_TIMEOUT_S:.0e}\n  fix: timeout=60, or None for 120"
        )
    return seconds


def _check_free_sms(free_sms: int | None, gemm: str, device_type: str) -> None:
    """Refuse multiprocessors that nothing can leave.

    Raises:
        GridError: `free_sms` of torch's GEMM on a device where it takes every multiprocessor.
    """
    if free_sms and gemm != "kernels" and not can_carve_out(device_type):
        raise GridError(
            f"ProcessGrid: free_sms={free_sms}, but torch's GEMMs take every multiprocessor of this device; those of "
            "Hopper and later ones can leave some\n  fix: gemm='kernels'"
        )


def own_gemm(gemm: str, free_sms: int | None, leave: int) -> TorchGemm:
    """Return what multiplies on each rank.

    Args:
        leave: the multiprocessors that kernels of ndtp leave to collectives.
    """
    if gemm == "kernels":
        return KernelGemm(sms_to_leave=leave)
    return CarvedGemm(free_sms) if free_sms else TorchGemm()


def sms_to_leave(
    free_sms: int | None, backend: str | None, max_ctas: int | None, groups_per_axis: int, grid: Grid
) -> int:
    """Multiprocessors that GEMMs leave to collectives: by default those that communicators along the axes can take.

    A thread block of NCCL takes one; `max_ctas` is the most that a communicator has, and each axis of several ranks has
    `groups_per_axis`.  0 where nothing says how many they are, and where collectives take none, as on gloo.
    """
    if free_sms is not None:
        return free_sms
    if not backend_named(backend).takes_multiprocessors or max_ctas is None:
        return 0
    return max_ctas * groups_per_axis * num_axes(grid)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise GridError(f"ProcessGrid: {name}={value!r} is not an integer of at least {least}")


def _check_device_type(device_type: object, backends: Mapping[str, str] | None) -> None:
    """Refuse a device that torch does not know, or, with several ranks, one that the process group does not serve."""
    try:
        known = isinstance(device_type, str) and torch.device(device_type).type == device_type
    except RuntimeError:
        known = False
    if not known:
        raise GridError(
            f"ProcessGrid: device_type={device_type!r} is no type of device; an index does not belong to it\n"
            "  fix: device_type='cpu' or 'cuda'"
        )
    if backends is not None and device_type not in backends:
        raise GridError(
            f"ProcessGrid: device_type={device_type!r}, but the process group has a backend for "
            f"{', '.join(sorted(backends))} alone\n  fix: init_process_group with a backend for it, or leave it out"
        )


def world_ranks(grid: Grid) -> list[int] | None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if grid.num_ranks not in (world, 1):
        raise GridError(
            f"ProcessGrid: grid {grid} has {grid.num_ranks} ranks, torch.distributed has {world}\n"
            f"  fix: a grid of {world} ranks, ProcessGrid.from_mesh for a part of them"
            + ("" if dist.is_initialized() else ", or init_process_group first")
        )
    return list(range(world)) if grid.num_ranks > 1 else None
