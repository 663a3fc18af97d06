"""CUDA graphs without a device: what may be captured, and a replay that computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.testing.cuda.order import Lane, StreamStandIn
from ndtp.testing.cuda.place import CudaFault, machine

if TYPE_CHECKING:
    from ndtp.testing.cuda.memory import MemoryBlock

_NUMBERS = itertools.count(1)


class _Ref(NamedTuple):
    """A tensor argument or result of a captured operation, by the memory that it covers."""

    block: MemoryBlock
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor, block: MemoryBlock) -> _Ref:
        return cls(block, x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    def on(self, storage: Any) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Operation(NamedTuple):
    what: str
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    made: tuple[tuple[int, _Ref], ...]  # places among the results whose memory is new


class Capture:
    """A capture under way, and what it has recorded.

    Attributes:
        lanes: those that are captured, the one on which the capture began first.
    """

    def __init__(self, origin: Lane) -> None:
        self.number = next(_NUMBERS)
        self.lanes: list[Lane] = []
        self.operations: list[_Operation] = []
        self.blocks: list[MemoryBlock] = []
        self.is_ended = self.is_abandoned = False
        self._before: list[tuple[Any, Any]] = []  # storages from outside, and their bytes before the capture wrote
        self._saved: set[int] = set()
        self.generators: list[Any] = []
        self.take_in(origin)

    def take_in(self, lane: Lane) -> None:
        lane.capture = self
        self.lanes.append(lane)

    def end(self) -> None:
        """End the capture: memory from outside is what it was, since a capture runs nothing.

        Raises:
            CudaFault: a lane that was captured does not come back to the one where the capture began.
        """
        origin, *others = self.lanes
        self.abandon()
        self.is_abandoned = False
        for lane in others:
            if lane.clock.get(lane.number, 0) > origin.clock.get(lane.number, 0):
                raise CudaFault(
                    f"the capture ends with work on {lane.name} that {origin.name} has not waited for "
                    "(cudaErrorStreamCaptureUnjoined)"
                )

    def abandon(self) -> None:
        """End a capture that failed: it may leave anything."""
        self.is_ended = self.is_abandoned = True
        for lane in self.lanes:
            lane.capture = None
        with _disable_current_modes(), torch.no_grad():
            for storage, before in self._before:
                storage.copy_(before)
        self._before.clear()

    def writes(self, x: Tensor, block: MemoryBlock) -> None:
        """Keep what memory from outside holds: it is written by a replay, not by the capture."""
        if block.capture is not self and block.number not in self._saved:
            self._saved.add(block.number)
            storage = x.untyped_storage()
            with _disable_current_modes():
                self._before.append((storage, storage.clone()))

    def add(
        self,
        what: str,
        run: Callable[..., Any],
        args: Arguments,
        kwargs: Keywords,
        results: list[Tensor],
        block_of: Callable[[Tensor], MemoryBlock],
        made: set[int],
    ) -> None:
        """Record an operation, by the memory of its tensors.

        Args:
            made: the places among the results whose memory is new.
        """

        def ref(x: Any) -> Any:
            return _Ref.of(x, block_of(x)) if isinstance(x, Tensor) and not x.is_meta else x

        fresh = tuple((i, _Ref.of(x, block_of(x))) for i, x in enumerate(results) if i in made)
        self.operations.append(_Operation(what, run, tree_map(ref, args), tree_map(ref, kwargs), fresh))


def tensors_of(part: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results, in order."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, (tuple, list)):
        return [x for each in part for x in tensors_of(each)]
    if isinstance(part, dict):
        return [x for each in part.values() for x in tensors_of(each)]
    return []


class GraphStandIn:
    """`torch.cuda.CUDAGraph` without a device: a replay runs the recorded operations on the captured memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._machine = machine()
        self._capture: Capture | None = None
        self._generators: list[Any] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        """See torch."""
        self._capture = self._machine.begin_capture()
        self._capture.generators = self._generators

    def capture_end(self) -> None:
        """See torch."""
        self._machine.end_capture()

    def register_generator_state(self, generator: torch.Generator) -> None:
        """See torch."""
        self._generators.append(generator)

    def instantiate(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def pool(self) -> object:
        """Return a token; every capture has memory of its own here."""
        return (0, id(self))

    def reset(self) -> None:
        """See torch."""
        self._capture = None

    def replay(self) -> None:
        """Run what was captured, on the current stream.

        Raises:
            CudaFault: memory that the graph uses has been freed, or nothing was captured.
        """
        capture = self._capture
        if capture is None or not capture.is_ended:
            raise CudaFault("replay of a graph that was not captured")
        self._machine.refuse_in_capture("replay of a graph")
        storages: dict[int, Any] = {}

        def tensor(x: Any) -> Any:
            if not isinstance(x, _Ref):
                return x
            if 0 in x.size:  # nothing to read or to write
                return torch.empty_strided(x.size, x.stride, dtype=x.dtype)
            storage = storages.get(x.block.number)
            if storage is None:
                storage = x.block.storage() if x.block.capture is not capture else None
                if storage is None:
                    raise CudaFault(f"{each.what} of a replay uses {x.block}, which has been freed since the capture")
                outside.add(x.block)
            return x.on(storage)

        outside: WeakSet[Any] = WeakSet()
        with _disable_current_modes(), torch.no_grad():
            for each in capture.operations:
                args, kwargs = (
                    tree_map(tensor, each.args, is_leaf=_is_ref),
                    tree_map(tensor, each.kwargs, is_leaf=_is_ref),
                )
                results = tensors_of(each.run(*args, **kwargs))
                for place, made in each.made:
                    found = results[place]
                    assert tuple(found.stride()) == made.stride and found.storage_offset() == made.offset, each.what
                    storages[made.block.number] = found.untyped_storage()
            for block in capture.blocks:
                kept, new = block.storage(), storages.get(block.number)
                if kept is not None and new is not None:
                    kept.copy_(new)
        self._machine.note_replay([*outside, *(block for block in capture.blocks if block.storage() is not None)])


def _is_ref(x: Any) -> bool:
    return isinstance(x, _Ref)


class GraphContext:
    """`torch.cuda.graph` without a device."""

    def __init__(self, cuda_graph: GraphStandIn, pool: Any = None, stream: Any = None, **options: Any) -> None:
        self._graph, self._stream = cuda_graph, stream or StreamStandIn()

    def __enter__(self) -> None:
        machine = self._graph._machine
        machine.synchronize(machine.all_lanes(), "the beginning of a capture")
        self._stream.__enter__()
        self._graph.capture_begin()

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self._graph.capture_end()
            else:
                self._graph._machine.abandon_capture()
        finally:
            self._stream.__exit__()
