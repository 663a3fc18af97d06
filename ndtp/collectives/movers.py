"""The choice of the collectives that move the tensors of a process grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndtp.collectives.collectives import Collectives, GlooCollectives

if TYPE_CHECKING:
    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.buffer_ring import BufferRing
    from ndtp.collectives.recorder import Recording


def collectives_of(groups: AxisGroups, ring: BufferRing, recording: Recording) -> Collectives:
    """Return the collectives for the backend of the process groups, and for the options of the grid."""
    if groups.mover == "symmetric" and groups.global_ranks is not None:
        from ndtp.collectives.symmetric.collectives import SymmetricCollectives

        return SymmetricCollectives(groups, ring, recording)
    kind = GlooCollectives if groups.backend == "gloo" else Collectives
    return kind(groups, ring, recording)
