"""What a process grid learns of the training step that runs on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ndtp.collectives.recorder import Recording
from ndtp.runtime.late_gradients import LateGradients
from ndtp.runtime.partial_sums import PartialSums
from ndtp.runtime.weight_prefetch import WeightPrefetch

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan
    from ndtp.schedule.chunk_choice import Speeds


class StepState:
    """The order in which weights are used, gradients on their way, and gradients held back.

    Nothing of that depends on what the garbage collector has done, on autograd's own order, or on other objects of a
    rank: it decides which collectives start, and when.

    Args:
        late: gradients on their way; grids that share process groups share them.

    Attributes:
        speeds: measured where a number of chunks is first chosen.
        chunk_choices: the numbers of chunks that were chosen, and why, by all that a choice depends on.
        chunks_chosen: the same, by plan and number of rows.
        recording: who looks on, if anybody does.
    """

    def __init__(self, late: LateGradients) -> None:
        self.prefetch, self.prefetch_backward = WeightPrefetch(is_forward=True), WeightPrefetch(is_forward=False)
        self.partial_sums = PartialSums()
        self.late = late
        self.speeds: Speeds | None = None
        self.chunk_choices: dict[tuple[object, ...], tuple[int, str]] = {}
        self.chunks_chosen: WeakKeyDictionary[MatMulPlan, dict[int, tuple[int, str]]] = WeakKeyDictionary()
        self.recording = Recording()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `ProcessGrid.accumulate`."""
        self.late.enter()
        self.partial_sums.depth += 1
        try:
            yield
        except BaseException:
            if self.late.break_off():  # nobody can say what is in the sums
                self.partial_sums.discard()
            raise
        finally:
            self.partial_sums.depth -= 1

    def reduce_gradients(self) -> None:
        """See `ProcessGrid.reduce_gradients`."""
        self.late.enter()
        self.partial_sums.finish()
