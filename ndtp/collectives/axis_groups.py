"""`AxisGroups`: a `Grid` as seen from one of its ranks, and torch's process groups along its axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ndtp.algebra.grid import Grid
from ndtp.collectives.backends import GLOO, Backend, backend_named
from ndtp.collectives.conversation import Conversation, conversation_of
from ndtp.collectives.grid_options import GridOptions
from ndtp.collectives.groups import default_timeout, shared_group
from ndtp.collectives.labels import Label
from ndtp.collectives.last_words import speak_at_the_end
from ndtp.collectives.own_presence import presence
from ndtp.collectives.watch import Watch
from ndtp.errors import GridError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DIRECTIONS = ("gather", "scatter")
Made = dict[tuple[tuple[str, ...], str], "ProcessGroup"]  # by axes and direction


class AxisGroups:
    """The place of a rank on a grid, and the groups along its axes: the part of a `ProcessGrid` that collectives
    use.

    Args:
        global_ranks: of torch's world, in the order of the grid's; None for a grid of one rank, which has no groups.
        options: of the grid, whose `device_type` is settled.
        backend: what moves the tensors; None for a grid of one rank.
        given: groups that are there already; those that are made for parameters join them.

    Attributes:
        kind: what is known of the backend.
        rank: this process's rank on the grid.
        coordinate: axis -> position.
        made: the groups that there are so far.
        given: those of parameters.
    """

    def __init__(
        self,
        grid: Grid,
        global_ranks: list[int] | None,
        options: GridOptions,
        backend: str | None,
        given: Made | None = None,
    ) -> None:
        self.grid, self.global_ranks, self.options, self.backend = grid, global_ranks, options, backend
        self.kind = backend_named(backend)
        self.device_type, self.timeout = options.device_type or "cpu", options.timeout
        if global_ranks is not None and (here := presence()) is not None:
            here.on_grid(grid, global_ranks)
            speak_at_the_end()
        self.rank = 0 if global_ranks is None else global_ranks.index(dist.get_rank())
        self.coordinate = grid.coordinate(self.rank)
        self.is_part = global_ranks is not None and len(global_ranks) < dist.get_world_size()
        self.groups_per_axis = options.groups_per_axis or (1 if self.is_part else self.kind.groups_per_axis)
        self.given: Made = {} if given is None else given
        self.made: Made = self.given if self.timeout is None else {}
        self._conversation: Conversation | None = None

    def group(self, axes: Sequence[str], direction: str = "gather") -> ProcessGroup:
        """The process group of the ranks that differ from this one on `axes` only.

        A group over several axes is made on first use, by its members together.

        Args:
            direction: "gather" or "scatter"; both have the same group where there is one group an axis.
        """
        key = (tuple(axes), direction if self.groups_per_axis == 2 else "gather")
        if key not in self.made:
            self.made[key] = self._make(*key, is_own=self.timeout is not None)
        return self.made[key]

    def parameters_group(self, axis: str) -> ProcessGroup:
        """Return the group of the parameters' axes.

        DTensor takes equal DeviceMeshes for one another, whatever their groups are, and keeps them for good: those of
        parameters are shared by grids of one timeout, never of one grid alone.
        """
        key = ((axis,), "gather")
        if key not in self.given:
            self.given[key] = self._make(*key, is_own=False)
        return self.given[key]

    def conversation(self) -> Conversation | None:
        """Return the conversation of all ranks of the grid, beside their tensors; None for one rank, or without
        peers.

        A collective at the first call.
        """
        if self._conversation is None:
            if self.grid.num_ranks == 1 or self.global_ranks is None or not self.kind.has_peers:
                return None
            axes = self.grid.nontrivial(self.grid.names)
            if self.kind.runs_in_host:
                group = self.group(axes)
            else:
                group = self.made[axes, "aside"] = self._make(axes, "aside", self.timeout is not None, GLOO)
            conversation = conversation_of(group, self.seconds)
            with Watch(self.describe, Label(("ranks",), "start", "meeting", axes), conversation.members):
                conversation.meet()
            self._conversation = conversation
        return self._conversation

    @property
    def current_conversation(self) -> Conversation | None:
        """The conversation, where ranks have had one already."""
        return self._conversation

    def _make(self, axes: tuple[str, ...], direction: str, is_own: bool, other: Backend | None = None) -> ProcessGroup:
        kind = other or self.kind
        if self.global_ranks is None:
            raise GridError(f"grid {self.grid} has one rank and no process groups")
        if self.is_part and not kind.can_group_alone():
            raise GridError(
                f"ProcessGrid: no process group over {' '.join(axes)} ({direction}): after "
                "init_process_group(device_id=...) NCCL makes groups by all ranks together, and grid "
                f"{self.grid} is a part of them\n  fix: init_process_group without device_id"
            )
        # torch names a group that its members alone make by how many groups they have: ranks that are in different
        # numbers of groups of the user's own would wait for each other under different names.  So where the grid is the
        # whole world, all of it makes all groups along the axes; a part of it cannot.  Of a fake world there is but
        # this rank, which need not make the groups of the thousands of others.
        alone = self.is_part or not self.kind.has_peers
        parallel = [self.rank] if alone else range(self.grid.num_ranks)
        groups = {tuple(sorted(self.global_ranks[r] for r in self.grid.group(rank, axes))): None for rank in parallel}

        seconds = self.seconds
        kind.prepare()
        asked, max_ctas = self.options, self.options.max_ctas
        if asked.thread_blocks is not None and kind.takes_multiprocessors:
            max_ctas = asked.thread_blocks.of((tuple(groups), direction, is_own))

        def arguments() -> dict[str, Any]:
            named = {} if other is None else {"backend": other.name}
            return {**kind.group_arguments(seconds, asked.high_priority, max_ctas), **named}

        own = object() if is_own else seconds
        options = (kind.name, own, asked.high_priority, max_ctas, direction)
        label = Label(("the grid's process group",), "start-up", "making", axes)
        # Where all ranks of the world make all groups along the axes, it is all that are waited for.
        waited_for = sorted(self.global_ranks) if len(groups) > 1 else self.members(axes)
        with Watch(self.describe, label, waited_for):
            return shared_group(
                tuple(groups), options, alone, arguments, axes, keep=not is_own, timeout=seconds,
                split=not alone and kind.can_split(),
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Return the seconds after which a wait fails."""
        return default_timeout() if self.timeout is None else self.timeout

    def members(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks of the world that differ from this one on `axes` only, this one among them."""
        ranks = self.global_ranks or [0]
        return tuple(sorted(ranks[rank] for rank in self.grid.group(self.rank, tuple(axes))))

    def seats(self, axes: Sequence[str]) -> tuple[int, ...] | None:
        """Return the rank in the process group of each rank along `axes`, in the order of the grid's index on them.

        torch orders the members of a group by their ranks of the world, steps count ranks along their axes: these
        differ where axes come in another order than the grid's, or the grid's ranks are permuted.

        Returns:
            None where they do not differ.
        """
        along, world = self.grid.group(self.rank, tuple(axes)), self.global_ranks
        if world is not None:
            along = tuple(world[rank] for rank in along)
        in_group = sorted(along)
        return None if list(along) == in_group else tuple(in_group.index(rank) for rank in along)

    def describe(self, axes: Sequence[str] = ()) -> str:
        """This rank and its coordinate, and the peers along `axes`: for errors."""
        where = ", ".join(f"{axis}={position}" for axis, position in self.coordinate.items())
        peers = [str(rank) for rank in self.grid.group(self.rank, tuple(axes)) if rank != self.rank]
        return f"rank {self.rank} ({where})" + (
            f" waited for rank{'s' * (len(peers) > 1)} {', '.join(peers)}" * bool(axes)
        )
