"""Assumptions about kinds of devices, which hold until the device at hand is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceKind:
    """Figures by which schedules are chosen.

    Attributes:
        own_part_from: multiply-adds below which a rank's own part does not go first while the others' are on their way:
            another product costs more than the wait it fills.
        probe_bytes: of a rank's share of a collective that shows the bandwidth of a link.  It must take many times as
            long as one that moves nothing.
        probe_side: of a square product that shows the rate of products.
        probe_gathers: the most gathers at a time beside which products are timed, for 0.1 s where ranks share
            processors; each takes the memory of its result.
        chunks_from: multiply-adds of a rank's forward, and bytes that it receives in a forward and backward, below
            which chunks of rows hide next to nothing: less than some milliseconds a step on a CPU, of 100 us on a GPU.
    """

    own_part_from: int
    probe_bytes: int
    probe_side: int
    probe_gathers: int
    chunks_from: tuple[int, int]


# CPU: measured.  gloo moves half a MiB in some milliseconds, a product of 384 takes some, too.
# CUDA: from the figures of the H200, not measured.  A product costs about 10 us beside its arithmetic (its launch, its
# first and its last tiles), in which 4e14 multiply-adds a second are 2^32.  NVLink moves 32 MiB in 90 us, a call of
# NCCL that moves nothing takes 10 to 20; a product of 4096 takes 200.
KINDS = {
    "cpu": DeviceKind(
        own_part_from=2**20, probe_bytes=2**19, probe_side=384, probe_gathers=16, chunks_from=(2**24, 2**17)
    ),
    "cuda": DeviceKind(
        own_part_from=2**32, probe_bytes=2**25, probe_side=4096, probe_gathers=4, chunks_from=(2**35, 2**22)
    ),
}


def kind_of(device_type: str) -> DeviceKind:
    """Return the kind of a device.

    An unknown accelerator counts as a GPU, because it is more like a GPU than like a CPU.
    """
    return KINDS["cpu" if device_type in ("cpu", "meta") else "cuda"]
