"""Messages between stages, as torch's schedules send and await them, with a name and an error of ndtp's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.algebra.pipeline_plan import AXIS
from ndtp.collectives.backends import backend_of
from ndtp.collectives.direct_exchange import is_elsewhere
from ndtp.collectives.flight import DONE, WAITED, Flight, FlightEntry, Note
from ndtp.collectives.labels import Label
from ndtp.collectives.own_presence import flight_of_world
from ndtp.collectives.watch import failure

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ndtp.collectives.codecs import Codec


def receive_op(buffer: Tensor, sender: int, group: ProcessGroup, name: str, phase: str, part: str = "") -> dist.P2POp:
    """Return the operation that receives a message: `name` is the name of the tensor, `part` the micro-batch."""
    label = Label((name,), phase, "receive", (AXIS,), part)
    labelled: Any = buffer
    labelled.ndtp_label = label
    return _message(dist.irecv, buffer, sender, group, label)


def send_op(part_of_x: Tensor, receiver: int, group: ProcessGroup, name: str, phase: str, part: str = "") -> dist.P2POp:
    """Return the operation that sends a message; see `receive_op`."""
    return _message(dist.isend, part_of_x, receiver, group, Label((name,), phase, "send", (AXIS,), part))


def encoded(x: Tensor, codec: Codec) -> Tensor:
    """Return a tensor as the bytes of a codec."""
    sent = x.new_empty(codec.num_bytes(tuple(x.shape)), dtype=torch.uint8)
    codec.encode(x, sent)
    return sent


def decode_into(room: Tensor, codec: Codec, landing: Tensor) -> None:
    """Put what came as bytes of a codec into its place."""
    room.copy_(codec.decode(landing, tuple(room.shape), room.dtype))


def exchange(ops: Sequence[dist.P2POp]) -> None:
    """Start all of these and wait for them."""
    for work in dist.batch_isend_irecv(list(ops)) if ops else []:
        work.wait()


def _message(op: Callable[..., object], x: Tensor, peer: int, group: ProcessGroup, label: Label) -> dist.P2POp:
    made = dist.P2POp(op, x, peer, group)
    if backend_of(group).runs_in_host:  # NCCL sends several at once, and its watchdog ends what lasts too long
        made.op = _Named(op, label, peer)
    return made


class _Named:
    """`isend` or `irecv` of one message, as schedules call it."""

    def __init__(self, op: Callable[..., Any], label: Label, peer: int) -> None:
        self.op, self.label, self.peer, self.__name__ = op, label, peer, op.__name__

    def __call__(self, x: Tensor, *, group_dst: int | None = None, group_src: int | None = None, **given: Any) -> Any:
        peer = group_src if group_dst is None else group_dst
        given["group_dst" if self.op is dist.isend else "group_src"] = peer
        flight, me = flight_of_world(), dist.get_rank()
        entry = None if flight is None else self._enter(flight, me, x)
        there, staged = x, None
        if is_elsewhere(x):
            there = x.cpu() if self.op is dist.isend else torch.empty_like(x, device="cpu")
            there.__dict__.update(x.__dict__)  # by its label a message is counted
            staged = x, there
        try:
            return _NamedWork(self, self.op(there, **given), entry, staged)
        except RuntimeError as error:
            raise self.failed(error) from error

    def _enter(self, flight: Flight, me: int, x: Tensor) -> FlightEntry:
        label, ranks = self.label, tuple(sorted((me, self.peer)))
        note = Note(label.op, label.phase, label.collective, label.axes, label.part, ranks)
        return flight.start(note, x.nbytes)

    def failed(self, error: RuntimeError) -> RuntimeError:
        me = dist.get_rank()
        where = f"rank {me} of the pipeline waited for rank {self.peer}"
        return failure(self.label, lambda axes: where, error, (me, self.peer))


class _NamedWork:
    def __init__(
        self, message: _Named, work: Any, entry: FlightEntry | None, staged: tuple[Tensor, Tensor] | None
    ) -> None:
        self._message, self._work, self._entry, self._staged = message, work, entry, staged

    def wait(self, *timeout: Any) -> Any:
        entry = self._entry
        try:
            if entry is not None:
                entry[WAITED] = time.monotonic()
            result = self._work.wait(*timeout)
        except RuntimeError as error:
            raise self._message.failed(error) from error
        if self._staged is not None and self._message.op is dist.irecv:
            x, arrived = self._staged
            x.copy_(arrived)
        if entry is not None:
            entry[DONE] = time.monotonic()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
