"""`Transfer`: one collective of a step for many grids at once, and the bytes that it takes on the wire.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ndtp.algebra.wire import KINDS, SCALE_BYTES, Wire
from ndtp.planner.grids import PerGrid


@dataclass(frozen=True)
class Transfer:
    """One collective of a step: elements received per rank, for each grid.

    Attributes:
        axis: one, or a set of them: see `Grids.splits`.
        kind: "wide": in fp32 at least; "counts": four bytes each.
        row: the elements that have a scale together where the wire has scales; 0: what travels as it is computed.
    """

    phase: str
    tensor: str
    collective: str
    axis: str
    elements: PerGrid
    kind: str = ""
    row: PerGrid = 0

    def num_bytes(self, itemsize: int, wire: Wire | None = None) -> PerGrid:
        """Return the bytes that a rank receives, scales included.

        Args:
            itemsize: of the dtype in which the blocks compute.
        """
        plain = self.elements * {"": itemsize, "wide": max(4, itemsize), "counts": 4}[self.kind]
        form = None if wire is None else wire.format(KINDS[self.tensor.split()[-1]])
        if form is None or form.itemsize >= itemsize or np.all(np.asarray(self.row) == 0):
            return plain
        scale = SCALE_BYTES * form.is_scaled
        if isinstance(self.elements, int) and isinstance(self.row, int):  # of one grid, and of any size
            saves = self.row * form.itemsize + scale < self.row * itemsize
            return self.elements * form.itemsize + self.elements // self.row * scale if saves else plain
        row = self.row + 0 * self.elements
        coded = self.elements * form.itemsize + self.elements // np.maximum(row, 1) * scale
        return np.where((row > 0) & (row * form.itemsize + scale < row * itemsize), coded, plain)
