"""`SymmetricCollectives`: every collective as copies out of the memory of peers, and sums of what was copied."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.collectives.collectives import Collectives
from ndtp.collectives.cross_check import cross_check
from ndtp.collectives.direct_exchange import Past, purpose_of
from ndtp.collectives.gloo import GlooCollectives
from ndtp.collectives.handles import Channel, Underway
from ndtp.collectives.meter import received_directly
from ndtp.collectives.streams import has_streams
from ndtp.collectives.symmetric.host import PROCESS, HostEngine
from ndtp.collectives.symmetric.windows import machine, shared_window, unusable_host
from ndtp.errors import GridError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from ndtp.algebra.steps import Step
    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.buffer_ring import BufferRing
    from ndtp.collectives.handles import Begin, Route, Shape
    from ndtp.collectives.labels import Label
    from ndtp.collectives.recorder import Recording
    from ndtp.collectives.symmetric.device import DeviceEngine

SMALLEST_SLOT = 2**16  # bytes


class SymmetricCollectives(GlooCollectives):
    """The collectives of `GlooCollectives`, with the same bytes and the same sums, by pulling instead of messages.

    A group has a window of memory, made where a route first needs it, and anew, twice as large or more, where one needs
    more: by all of its ranks together, which bind the same routes in one order.  On GPUs outgrown windows are kept,
    since captured graphs go on to use them: together they take no more than the largest.
    """

    arrives_in_parts = True

    def __init__(self, groups: AxisGroups, ring: BufferRing, recording: Recording) -> None:
        super().__init__(groups, ring, recording)
        self.orders_by_stream = self.marks_streams = has_streams(groups.device_type)
        self._engines: WeakKeyDictionary[ProcessGroup, HostEngine | DeviceEngine] = WeakKeyDictionary()
        self._outgrown: list[DeviceEngine] = []

    def sums_everywhere(self, dtype: torch.dtype) -> bool:
        return False  # a reduce-scatter and a gather, of any dtype

    def channel(self, group: ProcessGroup, label: Label, dtype: torch.dtype) -> Channel:
        """See `Collectives.channel`."""
        return Channel(group, self.groups.seats(label.axes), Past(), purpose_of(label, dtype))

    def _route(
        self, step: Step, op: tuple[str, ...], phase: str, shape: Shape, dtype: torch.dtype, part: str, blocks: bool
    ) -> Route:
        route = super()._route(step, op, phase, shape, dtype, part, blocks)
        ranks = self.groups.grid.size(step.axes)
        # An all-reduce is padded to whole parts.
        self._engine_for(route.channel.group, (math.prod(shape) + ranks) * dtype.itemsize)
        return route

    def make_room(self, route: Route, num_bytes: int) -> None:
        """See `Collectives.make_room`."""
        self._engine_for(route.channel.group, num_bytes)

    def _engine_for(self, group: ProcessGroup, num_bytes: int) -> None:
        engine = self._engines.get(group)
        if engine is not None and engine.window.slot_bytes >= num_bytes:
            return
        slot_bytes = max(SMALLEST_SLOT, 1 << (num_bytes - 1).bit_length())
        with _disable_current_modes(), no_python_dispatcher():  # not a part of what a meter counts
            if self.orders_by_stream:
                from ndtp.collectives.symmetric.device import DeviceEngine, DeviceWindow

                if isinstance(engine, DeviceEngine):
                    self._outgrown.append(engine)
                self._engines[group] = DeviceEngine(DeviceWindow.of(group, slot_bytes, self.groups.timeout))
            else:
                self._engines[group] = HostEngine(shared_window(group, slot_bytes), PROCESS, self.groups.timeout)

    # ---------------------------------------------------------------------------------------------------- handing over

    def _gather(self, landing: Tensor, x: Tensor, to: Channel, own: bool = True) -> Underway | None:
        ranks, flat = to.group.size(), _bytes(x)
        return self._pull([flat] * ranks, _bytes(landing).view(ranks, flat.numel()), False, to)

    def _exchange(self, landing: Tensor, blocks: Tensor, to: Channel, own: bool = True) -> Underway | None:
        ranks = to.group.size()
        sent, received = (_bytes(x).view(ranks, x.nbytes // ranks) for x in (blocks, landing))
        return self._pull(sent.unbind(), received, True, to)

    def _reduce_pair(self, to: Channel, shape: Shape) -> Begin:
        return self._reduce_all(to, 2, shape)  # every landing takes this rank's part, too

    def exchange_parts(self, landings: Sequence[Tensor], parts: Sequence[Tensor], to: Channel) -> Underway | None:
        """Exchange parts of any sizes by messages, since windows have one size."""
        kind = Collectives if self.orders_by_stream else GlooCollectives
        return kind.exchange_parts(self, landings, parts, to)

    def _pull(self, sent: Any, landing: Tensor, parted: bool, to: Channel) -> Underway | None:
        ranks, length = landing.shape
        received_directly((ranks - 1) * length)
        return self._engines[to.group].exchange(
            to.seated(sent), to.seated(landing.unbind()), parted, to.purpose + length
        )


def _bytes(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)


def check_usable(groups: AxisGroups) -> None:
    """Check that all ranks of a grid can read each other's memory; a collective.

    Raises:
        GridError: they cannot, for the same reason on all ranks.
        MismatchError: ranks are on several machines, or some can and others cannot.
    """
    if groups.global_ranks is None:
        return
    if groups.kind.device_type != groups.device_type:
        raise GridError(
            f"ProcessGrid: collectives='symmetric' takes gloo for CPUs and NCCL for GPUs, not {groups.backend} for "
            f"device_type={groups.device_type!r}\n  fix: collectives='torch'"
        )
    if groups.device_type == "cuda":
        from ndtp.collectives.symmetric.device import unusable_device

        reason = unusable_device()
    else:
        reason = unusable_host()
    signature = f"machine {machine()}" + (f": {reason}" if reason else "")
    cross_check(groups, signature, "whose memory they can read, for collectives='symmetric'", "collectives='torch'")
    if reason:
        raise GridError(
            f"ProcessGrid: collectives='symmetric' cannot be had here: {reason}\n  fix: collectives='torch'"
        )
