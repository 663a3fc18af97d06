"""The choice of the collectives that move the tensors of a process grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndtp.collectives.backends import GLOO, Backend
from ndtp.collectives.collectives import Collectives
from ndtp.collectives.gloo import GlooCollectives
from ndtp.collectives.summing import SummingCollectives

if TYPE_CHECKING:
    from ndtp.algebra.wire import Wire
    from ndtp.collectives.axis_groups import AxisGroups
    from ndtp.collectives.buffer_ring import BufferRing
    from ndtp.collectives.recorder import Recording


# Of backends whose collectives are not used as torch has them.
CLASSES: dict[str, type[Collectives]] = {GLOO.name: GlooCollectives}


def collectives_for(backend: Backend) -> type[Collectives]:
    """The class that moves tensors over a backend."""
    return CLASSES.get(backend.name, Collectives)


def collectives_of(groups: AxisGroups, ring: BufferRing, recording: Recording, wire: Wire | None) -> Collectives:
    """Return the collectives for the backend of the process groups, and for the options of the grid."""
    kind = collectives_for(groups.kind)
    if groups.options.sums == "fp32" and kind is Collectives:
        kind = SummingCollectives
    if groups.options.collectives == "symmetric" and groups.global_ranks is not None:
        from ndtp.collectives.symmetric.collectives import SymmetricCollectives as kind
    made = kind(groups, ring, recording)
    made.wire = wire
    return made
