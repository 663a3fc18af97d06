"""`RecordedCuda`: the tensors of CPUs play those of a device, and every operation is checked as CUDA would order it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)

from ndtp.collectives import streams
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.runtime.rehearsal import DRAWS, READS_IN_HOST
from ndtp.testing.cuda import symmetric
from ndtp.testing.cuda.graph import Capture, GraphContext, GraphStandIn, tensors_of
from ndtp.testing.cuda.memory import Access, Blocks, MemoryBlock, View
from ndtp.testing.cuda.multiprocessors import Operation
from ndtp.testing.cuda.order import EventStandIn, Lane, StreamStandIn, VectorClock, join
from ndtp.testing.cuda.place import ACTIVE, CudaFault
from ndtp.testing.cuda.works import Communication

_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


class RecordedCuda(TorchDispatchMode):
    """A context in which the CPU plays a CUDA device, for tests of code that orders its work by streams.

        with RecordedCuda() as cuda:
            step()
        # raises CudaFault here: two streams touch one place, memory is freed too early, work that nobody waits for

    Streams, events, graphs and `torch.cuda.graph` are stand-ins; operations run at once, so that numbers are right, and
    are checked as if each ran at any time that the order of streams leaves.  A capture refuses what CUDA refuses, a
    replay computes.  Collectives of process groups other than gloo's run on a stream of their own each, as NCCL's do.

    Args:
        record: keep every operation, in the order of issue: its lane, and what must come before it.

    Attributes:
        faults: what was found, and is raised at the end.
        operations: (lane, name), if they are kept.
        trace: the same with what must be done before each, for `find_deadlock` and `RecordedClock`.
    """

    device = torch.device("cpu")

    def __init__(self, record: bool = False) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.host: VectorClock = {}
        self.lanes: dict[int, Lane] = {}
        self.operations: list[tuple[str, str]] = []
        self.trace: list[Operation] = []
        self._records = record
        self._blocks = Blocks(self._freed)
        self._capture: Capture | None = None
        self._local, self._lock = threading.local(), threading.RLock()
        self.communication = Communication(self)
        self._stack = ExitStack()

    # ------------------------------------------------------------------------------------------------------- streams

    def current_stream(self, device: object = None) -> StreamStandIn:
        stack = self._stack_of_thread()
        return stack[-1] if stack else self.default

    def enter_stream(self, stream: StreamStandIn) -> None:
        self._stack_of_thread().append(stream)

    def leave_stream(self) -> None:
        self._stack_of_thread().pop()

    def _stack_of_thread(self) -> list[StreamStandIn]:
        if not hasattr(self._local, "streams"):
            self._local.streams = []
        found: list[StreamStandIn] = self._local.streams
        return found

    def _mark(self, *_: object) -> tuple[int, int, int]:
        return (self.current_stream().stream_id, 0, 0)

    def all_lanes(self) -> list[Lane]:
        return [*self.lanes.values(), *self.communication.lanes()]

    def synchronize(self, lanes: Iterable[Lane] | None = None, what: str = "torch.cuda.synchronize") -> None:
        """The host waits for all that was enqueued."""
        self.refuse_in_capture(what)
        for lane in self.all_lanes() if lanes is None else lanes:
            join(self.host, lane.clock)

    # ------------------------------------------------------------------------------------------------------- kernels

    def launch(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor], lane: Lane | None = None) -> Lane:
        """Enqueue an operation, on the current stream unless a lane is given, and check what it touches."""
        with self._lock:
            lane = self.current_stream().lane if lane is None else lane
            if self._capture is not None and lane.capture is None:
                raise CudaFault(
                    f"{what} on {lane.name} during a capture that {lane.name} is no part of: replays lack it"
                )
            join(lane.clock, self.host)
            reads, writes = list(reads), list(writes)
            if self._records:
                self.operations.append((lane.name, what))
                self._trace(what, lane, sum(x.nbytes for x in reads), sum(x.nbytes for x in writes))
            tick = lane.tick()
            for is_write, tensors in ((False, reads), (True, writes)):
                for x in tensors:
                    if x.numel():
                        self._touch(x, what, lane, tick, is_write)
            return lane

    def _trace(self, what: str, lane: Lane, read: int, written: int) -> None:
        number, members = lane.clock.get(lane.number, 0) + 1, self.communication.members_of(lane)
        self.trace.append(Operation(lane.number, number, what, dict(lane.clock), members, read, written))

    def kernel(
        self,
        what: str,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        run: Callable[..., object] | None = None,
    ) -> None:
        """Enqueue a kernel of the program's own, which no mode of torch sees.

        Args:
            run: computes it, called with the tensors that it writes and then those that it reads.
        """
        capture, compute = self._capture, run or (lambda *_: None)
        for x in writes if capture is not None else ():
            assert capture is not None
            capture.writes(x, self.block_of(x))
        self.launch(what, reads, writes)
        with _disable_current_modes(), torch.no_grad():
            compute(*writes, *reads)
        if capture is not None:
            capture.add(what, compute, (*writes, *reads), {}, [], self.block_of, set())

    def _touch(self, x: Tensor, what: str, lane: Lane, tick: int, is_write: bool) -> None:
        block, view = self.block_of(x), View.of(x)
        other = block.conflicts(view, lane, is_write)
        if other is not None:
            verb = "writes" if is_write else "reads"
            self._found(f"race: {what} on {lane.name} {verb} {block}, which {other.what} may still use")
        block.note(Access(lane.number, tick, view, f"{what} on {lane.name}"), lane.clock, is_write)
        if is_write and self._capture is not None:
            self._capture.writes(x, block)

    def block_of(self, x: Tensor) -> MemoryBlock:
        # Made before the stand-in was in place, or by `torch.tensor`, which no mode sees: here and now.
        lane = self.current_stream().lane
        return self._blocks.find(x) or self._blocks.add(x, "code that no mode sees", lane, None)

    def made(self, x: Tensor, what: str) -> None:
        lane = self.current_stream().lane
        block = self._blocks.add(x, what, lane, self._capture)
        if self._capture is not None:
            self._capture.blocks.append(block)

    def _freed(self, block: MemoryBlock) -> None:
        if not ACTIVE or ACTIVE[-1] is not self:
            return
        access = block.still_used(self.host)
        if access is not None:
            self._found(f"early free: {block} is freed while {access.what} may still run")

    def _found(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)

    # ------------------------------------------------------------------------------------------------------- capture

    @property
    def capture(self) -> Capture | None:
        """The capture under way."""
        return self._capture

    def is_capturing(self) -> bool:
        return self.current_stream().lane.capture is not None

    def refuse_in_capture(self, what: str) -> None:
        if self._capture is not None:
            raise CudaFault(f"{what} during a capture (cudaErrorStreamCaptureUnsupported){_where()}")

    def begin_capture(self) -> Capture:
        self.refuse_in_capture("a second capture")
        self._capture = Capture(self.current_stream().lane)
        return self._capture

    def end_capture(self) -> None:
        capture, self._capture = self._capture, None
        if capture is None:
            raise CudaFault("the end of a capture that has not begun")
        for lane in capture.lanes:
            join(self.host, lane.clock)  # nothing of it has run
        capture.end()

    def abandon_capture(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            for lane in capture.lanes:
                join(self.host, lane.clock)
            capture.abandon()

    def note_replay(self, blocks: list[MemoryBlock]) -> None:
        """A replay reads and writes all memory of its graph, on the current stream."""
        with self._lock:
            lane = self.current_stream().lane
            join(lane.clock, self.host)
            tick = lane.tick()
            for block in blocks:
                storage = block.storage()
                if storage is not None and storage.nbytes():
                    whole = View(0, storage.nbytes(), True, (storage.nbytes(),), (1,), 1)
                    if (other := block.conflicts(whole, lane, True)) is not None:
                        self._found(f"race: a replay on {lane.name} uses {block}, which {other.what} may still use")
                    block.note(Access(lane.number, tick, whole, f"a replay on {lane.name}"), lane.clock, True)

    # -------------------------------------------------------------------------------------------- operations of torch

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace == "c10d" or self.communication.is_sending:  # recorded before it was sent
            return func(*args, **kwargs)
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # it unfolds into plain operations, which come back here one by one
        if func.namespace == "_c10d_functional":
            return self.communication.functional(func, args, kwargs)
        name = func.overloadpacket.__name__
        if self._capture is not None and name in DRAWS:
            self._check_generator(name, kwargs.get("generator"))
        if not _have_memory(args) and not _have_memory(kwargs):
            result = func(*args, **kwargs)
            if _have_memory(result):
                self.ran(func, args, kwargs, result, name, [])
            return result
        if name in READS_IN_HOST and not (name == "repeat_interleave" and len(args) == 1):
            self._read_in_host(name, args)
        written = _written(func, args, kwargs)
        if self._capture is not None:
            for x in written:
                self._capture.writes(x, self.block_of(x))
        result = func(*args, **kwargs)
        self.ran(func, args, kwargs, result, name, written)
        return result

    def _read_in_host(self, name: str, args: Arguments) -> None:
        self.refuse_in_capture(f"aten.{name}, whose result the host reads,")
        lane = self.launch(f"aten.{name}", tensors_of(args), ())
        join(self.host, lane.clock)

    def _check_generator(self, name: str, generator: Any) -> None:
        assert self._capture is not None
        if generator is not None and not any(
            generator.device == known.device and generator.initial_seed() == known.initial_seed()
            for known in self._capture.generators
        ):
            raise CudaFault(
                f"aten.{name} draws from a generator that the graph does not know (register_generator_state)"
            )

    def ran(
        self, func: TorchFunction, args: Arguments, kwargs: Keywords, result: object, name: str, written: list[Tensor]
    ) -> None:
        """Record an operation of torch that has computed its result."""
        given, results = tensors_of(args) + tensors_of(kwargs), tensors_of(result)
        given = [x for x in given if not x.is_meta]
        if any(x.is_meta for x in results):
            return
        known = {x.untyped_storage()._cdata for x in given}
        fresh = {i for i, x in enumerate(results) if x.untyped_storage()._cdata not in known}
        if results and not fresh and not written:
            return  # a view
        for i in fresh:
            if self._blocks.find(results[i]) is None:
                self.made(results[i], f"aten.{name}")
        if name not in _ALLOCATES:
            self.launch(f"aten.{name}", given, [*written, *(results[i] for i in fresh)])
        if self._capture is not None:
            self._capture.add(f"aten.{name}", func, args, kwargs, results, self.block_of, fresh)

    # ------------------------------------------------------------------------------------------------------- in place

    def __enter__(self) -> RecordedCuda:
        if ACTIVE:
            raise CudaFault("a RecordedCuda is in place already")
        ACTIVE.append(self)
        self.default = StreamStandIn()
        self.default.lane.name = "the default stream"
        stack = self._stack = ExitStack()
        stack.callback(ACTIVE.remove, self)
        for target, name, value in self._patches():
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.enter_context(mock.patch.object(streams, "STREAMED", {"cuda", "cpu"}))
        stack.enter_context(self.communication.in_place())
        super().__enter__()
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        super().__exit__(kind, value, trace)
        if kind is None:
            self.faults += self.communication.unjoined()
        self._stack.close()
        if kind is None and self.faults:
            raise CudaFault("\n".join(self.faults))

    def _patches(self) -> Iterator[tuple[object, str, object]]:
        cuda = torch.cuda
        yield cuda, "Stream", StreamStandIn
        yield cuda, "Event", EventStandIn
        yield cuda, "CUDAGraph", GraphStandIn
        yield cuda, "graph", GraphContext
        yield cuda, "current_stream", self.current_stream
        yield cuda, "default_stream", lambda device=None: self.default
        yield cuda, "stream", _stream
        yield cuda, "synchronize", lambda device=None: self.synchronize()
        yield cuda, "is_current_stream_capturing", self.is_capturing
        yield cuda, "current_device", lambda: 0
        yield torch._C, "_cuda_getCurrentStream", self._mark
        yield from symmetric.patches(self)
        yield Tensor, "record_stream", self._record_stream
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.optim") and hasattr(module, "_get_capturable_supported_devices"):
                yield module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu", "cuda"]

    @property
    def _record_stream(self) -> Callable[[Tensor, StreamStandIn], None]:
        def record_stream(x: Tensor, stream: StreamStandIn) -> None:
            self.block_of(x).streams.add(stream.lane.number)

        return record_stream


def _have_memory(part: object) -> bool:
    return any(not x.is_meta for x in tensors_of(part))


def _written(func: Any, args: Arguments, kwargs: Keywords) -> list[Tensor]:
    """The arguments that an operation writes to."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            written += tensors_of(value)
    return written


@contextmanager
def _stream(stream: StreamStandIn | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def _where() -> str:
    """The line of the program that led here: the innermost one outside of torch and of this package."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and "/ndtp/testing/cuda/" not in frame.filename:
            return f", at {frame.filename}:{frame.lineno}: {frame.line}"
    return ""
