"""A check whether ranks share their processors, so that none is left to move bytes while they multiply."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ndtp.collectives.cross_check import differing

if TYPE_CHECKING:
    from ndtp.collectives.axis_groups import AxisGroups


def shared_processors(groups: AxisGroups) -> int:
    """Return how many processors all ranks share if their threads take all of them, else 0; a collective.

    Ranks behind network devices of their own do not: their bytes take time that no processor works.
    """
    where = _where()
    crowded = groups.grid.num_ranks * torch.get_num_threads() >= len(where[-1])
    return len(where[-1]) if differing(groups, f"{where} {crowded}") is None and crowded else 0


def _where() -> tuple[str, str, tuple[int, ...]]:
    """The machine, its network as this process sees it, and the processors that it may use."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
        processors = tuple(sorted(os.sched_getaffinity(0)))
    except (OSError, AttributeError):  # not Linux
        machine, network, processors = platform.node(), "", tuple(range(os.cpu_count() or 1))
    return machine, network, processors
