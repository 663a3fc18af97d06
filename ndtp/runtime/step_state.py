"""The state that a process grid learns of the training step that runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref
from zlib import crc32

import torch
from torch import Tensor

from ndtp.collectives.recorder import Recording
from ndtp.runtime.chunk_choices import ChunkChoices
from ndtp.runtime.facts import hash_of_content
from ndtp.runtime.late_gradients import LateGradients
from ndtp.runtime.partial_sums import PartialSums
from ndtp.runtime.residuals import Residuals
from ndtp.runtime.weight_prefetch import WeightPrefetch

if TYPE_CHECKING:
    from ndtp.runtime.recheck import Recheck


_MOST_USES = 100_000
_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
_comes_by: Callable[[torch.autograd.graph.Node], bool] = torch._C._will_engine_execute_node
# Begin the name of a weight that is no parameter, and of one that was used while gradients were accumulated.
COMPUTED, EARLIER = "what is computed of ", "in earlier micro-batches alone: "


ReadWeight = tuple[str, ref[Any]]  # a parameter that code has read, and may compute with or not; its node of autograd


class StepState:
    """The order in which weights are used, gradients on their way, and gradients held back.

    Nothing of that depends on what the garbage collector has done, on autograd's own order, or on other objects of a
    rank: it decides which collectives start, and when.

    Args:
        late: gradients on their way; grids that share process groups share them.

    Attributes:
        chunks: the numbers of chunks that were chosen, and what they rest on.
        recording: who looks on, if anybody does.
        recheck: has some products computed again by another rank; None: none.
        residuals: what the wire's rounding has kept back of gradients.
        expect_backward: is told of whole tensors, such as losses, that code has made of split activations, and of what
            else they were made of.
        loaded: what was put in the place of parameters as every rank has it whole, by names and hashes, until ranks
            compare it; None: nobody does.
        uses: the names of weights that were used since ranks last compared them, in a graph, and "" behind each call
            of a model; None: nobody does.
        uses_differ: whether ranks used other weights before the last backward.
        watched: who compares the calls of the models of the grid.
        row_axes: the axes along which ranks have rows of their own, whose gradients are summed.
        computed: the weights that code has computed, by the backward that came by, with what ranks compare of them.
        reduce_held: sums what any rank of the grid has held back; None: all ranks hold back the same.
    """

    def __init__(self, late: LateGradients) -> None:
        self.prefetch, self.prefetch_backward = WeightPrefetch(is_forward=True), WeightPrefetch(is_forward=False)
        self.partial_sums = PartialSums()
        self.late = late
        self.chunks = ChunkChoices()
        self.recording = Recording()
        self.recheck: Recheck | None = None
        self.residuals = Residuals()
        self.expect_backward: Callable[[Tensor, Any], None] | None = None
        self.loaded: list[tuple[str, Any]] | None = None
        self.uses: list[str | ReadWeight] | None = None
        self.uses_differ = False
        self.watched: WeakSet[Any] = WeakSet()
        self.row_axes: tuple[str, ...] = ()
        self.computed: dict[int, list[tuple[str, Tensor]]] = {}
        self.reduce_held: Callable[[Any], None] | None = None
        self._accumulated: set[str] = set()

    def made_whole(self, result: Any, operands: object = ()) -> Any:
        """The result, of which `expect_backward` is told: what every rank has whole, made of a split activation.

        Args:
            operands: what a function made a loss of beside it.
        """
        if self.expect_backward is not None and type(result) is Tensor and result.requires_grad:
            self.expect_backward(result, operands)
        return result

    def note_loaded(self, name: str, dense: Tensor) -> None:
        """Note what is put in the place of a parameter, which every rank has whole."""
        if self.loaded is not None and dense.layout is torch.strided:
            self.loaded.append((name, hash_of_content(dense)))

    def taken_loaded(self) -> list[tuple[str, int]]:
        """Return what was loaded since ranks last compared it, by names and hashes."""
        if not self.loaded:
            return []
        found, self.loaded = self.loaded, []
        return [(name, int(seen) & (1 << 63) - 1) for name, seen in found]

    def note_uses(self, names: Sequence[str], of_parameters: bool, node: object = None) -> None:
        """Note weights that are used in a graph, but for what a checkpoint computes again.

        Args:
            of_parameters: whether the gradients are those of parameters, which may be summed when backward ends; else
                what computed the weights waits for them.
            node: of autograd, for what code has read, and may compute with or not.
        """
        uses = self.uses
        if uses is None or _graph_task() != -1:
            return
        for name in names:
            own = name if of_parameters else COMPUTED + name
            uses.append(own if node is None else (own, ref(node)))

    def end_call(self) -> None:
        """Note that a call of a model has ended, which used some weights.

        The names are kept bounded, of a program that calls a model with a graph and never goes backward.
        """
        if self.uses:
            self.uses.append("")
        if self.uses and len(self.uses) > _MOST_USES:
            names = "\n".join(use if isinstance(use, str) else use[0] for use in self.uses)
            self.uses = [f"{len(self.uses)} uses, of a hash {crc32(names.encode()):08x}"]

    def taken_uses(self) -> list[str]:
        """Take, in a backward, the weights that were used since the last one: each use ends in collectives of its own.

        While gradients are accumulated ranks may use others, but for those whose gradients do not wait.
        """
        found: list[str] = []
        waiting: list[str | ReadWeight] = []
        for use in self.uses or ():
            if isinstance(use, str):
                found.append(use)
            elif (node := use[1]()) is not None:  # else no backward comes by any more
                if _comes_by(node):
                    found.append(use[0])
                else:
                    waiting.append(use)  # for another backward
        self.uses = waiting
        if self.partial_sums.depth:
            at_once = [name for name in found if name.startswith(COMPUTED)]
            self._accumulated.update(set(found).difference(at_once, [""]))
            return at_once
        before, self._accumulated = self._accumulated, set()
        return found + [EARLIER + name for name in sorted(before.difference(found))] if before else found

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

    def reduce_gradients(self, mesh: object) -> None:
        """See `ProcessGrid.reduce_gradients`."""
        self.late.enter()
        self._accumulated = set()
        if self.reduce_held is None:
            self.partial_sums.finish()
        else:
            self.reduce_held(mesh)
