"""The end of a process grid: its groups, and what was bound to them, are dropped."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ndtp.collectives.direct_exchange import past_of
from ndtp.collectives.groups import end, never_destroy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ndtp.collectives.axis_groups import Made
    from ndtp.runtime.program import Programs


def let_go(programs: Programs, groups: Made, of_parameters: Made, timeout: float | None) -> None:
    """Drop the groups of a grid that is gone, or whose program ends; end those with a timeout, which no grid shares.

    What was bound holds on to them, too.

    gloo's threads return tensors to Python a little after a collective is done, and abort a program whose interpreter
    is gone by then.  `destroy_process_group` ends the threads of groups that nobody holds.
    """
    if hasattr(sys, "last_value"):  # an exception ended the program
        never_destroy()
    elif timeout is not None:
        for group in groups.values():
            end(group, timeout if past_of(group).given_up else 0.0)
    programs.clear()
    groups.clear()
    of_parameters.clear()


def let_go_of_mesh(device_mesh: DeviceMesh) -> None:
    """DTensor's caches hold on to the mesh, which need not hold on to its groups: torch finds them by name, too."""
    getattr(device_mesh, "_pg_registry", {}).clear()
