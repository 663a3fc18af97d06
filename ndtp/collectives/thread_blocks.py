"""The thread blocks that the collectives of a grid may have: all of them together take a quarter of a device.

NCCL's kernels wait for their peers while they hold a multiprocessor.  Two ranks that run such kernels of different
communicators, and GEMMs beside them, on all of their multiprocessors would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Hashable

from ndtp.algebra.grid import Grid
from ndtp.errors import warn

LATER = 3  # communicators over several axes for which room is left, on grids of as many axes: most steps have no more


def quarter_of(multiprocessors: int) -> int:
    """The multiprocessors of a device that collectives may take together."""
    return multiprocessors // 4


def ctas_that_fit(multiprocessors: int, groups_per_axis: int, grid: Grid, others: int = 0) -> int:
    """Thread blocks of each communicator, so that those of all that can be busy at once take a quarter of a device.

    Counted are the communicators along the axes, `others`, and some of the groups over several axes, which a step makes
    when it first needs them.

    Args:
        others: communicators that are busy beside those along the axes, such as that of a pipeline.
    """
    axes = num_axes(grid)
    communicators = groups_per_axis * axes + min(axes, LATER) + others
    return max(1, quarter_of(multiprocessors) // max(communicators, 1))


def num_axes(grid: Grid) -> int:
    """The number of axes of several ranks, which are those that have communicators."""
    return sum(size > 1 for size in grid.shape)


class ThreadBlocks:
    """The thread blocks of every communicator of a grid and of its refinements, which share a quarter of the device.

    The first ones, along the axes, have `each`.  A group that is made later has half of what is left, `each` at most:
    so there is room for further ones, however many the first took.  When nothing is left they have one, and a warning
    says by how much they exceed the quarter.

    Args:
        each: of a communicator along an axis.
        first: the number of communicators that are made with the grid.
        quarter: what all of them may take together.

    Attributes:
        by_communicator: the thread blocks of each so far.
    """

    def __init__(self, each: int, first: int, quarter: int) -> None:
        self.each, self.first, self.quarter = each, first, quarter
        self.by_communicator: dict[Hashable, int] = {}

    @property
    def taken(self) -> int:
        """The sum of all communicators so far."""
        return sum(self.by_communicator.values())

    def of(self, communicator: Hashable) -> int:
        """Return the thread blocks of a communicator, the same whenever it is asked."""
        if communicator not in self.by_communicator:
            before, left = self.taken, self.quarter - self.taken
            is_first = len(self.by_communicator) < self.first
            self.by_communicator[communicator] = self.each if is_first else max(1, min(self.each, left // 2))
            if before <= self.quarter < self.taken:
                self._tell()
        return self.by_communicator[communicator]

    def _tell(self) -> None:
        many, taken = len(self.by_communicator), self.taken
        warn(
            f"ndtp: the {many} communicators of a grid can take {taken} multiprocessors together, more than the "
            f"{self.quarter} that are a quarter of this device\n  fix: a grid of fewer axes"
        )
