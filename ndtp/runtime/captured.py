"""`ndtp.capture`: a whole training step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ndtp.algebra.volume import Volume
from ndtp.collectives.meter import CommMeter
from ndtp.collectives.streams import has_streams
from ndtp.errors import CaptureError
from ndtp.runtime.captured_modules import HeldModules
from ndtp.runtime.captured_optimizers import HeldOptimizers
from ndtp.runtime.region import KeyTape, Region
from ndtp.runtime.rehearsal import StepWatch, described, differences

WARM_UP = 3
LEAST_WARM_UP = 3  # kernels are compiled and state is made in the first; the last two are compared


def capture(
    step: Callable[..., object], example: object, *, warm_up: int = WARM_UP, eager: bool = False
) -> CapturedStep:
    """Have a training step run as one CUDA graph: what its host part costs becomes one launch.

        def step(ids, labels):
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            norm = ndtp.nn.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        step = ndtp.capture(step, (ids, labels))
        for ids, labels in batches:
            loss, norm = step(ids, labels)

    Every call is one step of training and none is run twice: the first `warm_up` calls run as they are, the next one is
    captured, and it and all further ones are replays.  A replay does what the call would have done, on the tensors of
    this call: dropout of ndtp draws anew from torch's default generator, and learning rates may change between calls,
    by a scheduler or by hand.  Forward, backward, several micro-batches, clipping and the optimizer may all be inside.

    What a graph cannot hold is refused by name and line, and nothing falls back in silence: reading a tensor in the
    host (`item`, `print`, `if`), copies from or to the host, numbers or operations that differ between the last two
    calls before the capture, gradients that are left for the next call, collectives over gloo.  Refused is, too, what
    was set since the capture: `model.eval()`, `requires_grad_`, settings of the optimizer.  A number of the program
    that changes only after the warm-up is frozen in the graph, and nobody can see that.

    Args:
        step: takes tensors, and returns tensors, in any nesting of tuples, lists and dicts, or None.
        example: its arguments, a tuple of them or the only one: all calls have their shapes, dtypes and devices.
        warm_up: calls before the capture, three at least.
        eager: run every call as it is, on any device, and capture nothing: to debug.

    Raises:
        CaptureError: nothing of the example is on a device that has graphs, and `eager` was not asked for; at a call,
            what stands in the way of a capture, or of a replay.
    """
    return CapturedStep(step, example if isinstance(example, tuple) else (example,), warm_up, eager)


class CapturedStep:
    """A step that `capture` was given, as a function of the same arguments.

    Attributes:
        calls: that were made so far.
        volume: the bytes that a replay receives from other ranks; None before the capture.
    """

    def __init__(self, step: Callable[..., Any], example: tuple[Any, ...], warm_up: int, eager: bool) -> None:
        if warm_up < LEAST_WARM_UP:
            raise CaptureError(f"ndtp.capture: warm_up={warm_up}, but three calls come before a capture at least")
        leaves, self._structure = tree_flatten(example)
        strange = [x for x in leaves if not isinstance(x, Tensor)]
        if strange:
            raise CaptureError(
                f"ndtp.capture: the example holds {strange[0]!r}, which a graph would keep\n"
                "  fix: tensors alone; bind others with functools.partial"
            )
        on_device = [x for x in leaves if has_streams(x.device.type)]
        if not on_device and not eager:
            where = ", ".join(sorted({x.device.type for x in leaves})) or "nothing"
            raise CaptureError(
                f"ndtp.capture: the example is on {where}, where there are no CUDA graphs\n"
                "  fix: tensors of a GPU; or eager=True, which runs every call as it is"
            )
        self.step, self.warm_up, self.is_eager = step, warm_up, eager
        self.calls, self.volume = 0, None
        if eager:
            return
        self.device = on_device[0].device
        self._inputs = [torch.empty_like(x) for x in leaves]
        self._optimizers, self._keys = HeldOptimizers(self.device), KeyTape()
        self._modules = HeldModules(self.device)
        self._drawn: Tensor | None = None  # the keys of a replay
        self._rehearsals: list[StepWatch] = []
        self._called: list[nn.Module] = []  # by the last call before the capture
        self._stream = torch.cuda.Stream()
        self._graph: Any = None
        self._results: Any = None
        self._broken = ""

    volume: Volume | None

    def __call__(self, *inputs: Any) -> Any:
        """Make one step.

        Returns:
            what the step returns; after the capture, tensors of their own with its values.

        Raises:
            CaptureError: see `capture`; and an input that is not like the example's.
        """
        if self.is_eager:
            self.calls += 1
            return self.step(*inputs)
        if self._broken:
            raise CaptureError(self._broken)
        self._take_in(inputs)
        self._optimizers.take_over_rates()
        self.calls += 1
        try:
            if self._graph is None and self.calls <= self.warm_up:
                return self._rehearse()
            if self._graph is None:
                self._capture()
        except CaptureError as error:
            self._broken = str(error)
            raise
        return self._replay()

    def __repr__(self) -> str:
        name = getattr(self.step, "__qualname__", repr(self.step))
        if self.is_eager:
            return f"<step {name}: runs as it is>"
        return (
            f"<step {name}: "
            + ("captured" if self._graph is not None else f"captured at call {self.warm_up + 1}")
            + ">"
        )

    def _take_in(self, inputs: tuple[object, ...]) -> None:
        leaves, structure = tree_flatten(inputs)
        if structure != self._structure:
            raise CaptureError(f"ndtp.capture: the arguments are {structure}, those of the example {self._structure}")
        for i, (x, static) in enumerate(zip(leaves, self._inputs, strict=True)):
            if not isinstance(x, Tensor) or x.shape != static.shape or x.dtype != static.dtype:
                given = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else repr(x)
                raise CaptureError(
                    f"ndtp.capture: tensor {i} of the arguments is {given}, the example has {tuple(static.shape)} of "
                    f"{static.dtype}\n  fix: a graph holds one shape; capture the step once for each"
                )
        with torch.no_grad():
            for x, static in zip(leaves, self._inputs, strict=True):
                static.copy_(x, non_blocking=True)

    def _run(self) -> Any:
        return self.step(*tree_unflatten(self._inputs, self._structure))

    def _rehearse(self) -> Any:
        """Run the step as it is, beside the stream of the program, and watch the last two calls before the capture."""
        is_watched = self.calls > self.warm_up - 2
        self._keys.begin()
        self._stream.wait_stream(torch.cuda.current_stream())
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(self._optimizers.watched())
            stack.enter_context(Region(self._keys, compares=not is_watched).entered())
            if is_watched:
                self._rehearsals.append(stack.enter_context(StepWatch()))
            results = self._run()
        here = torch.cuda.current_stream()
        here.wait_stream(self._stream)
        for x in tree_flatten(results)[0]:
            if isinstance(x, Tensor):
                x.record_stream(here)  # who called uses it there
        if self.calls == self.warm_up:
            self._judge()
        return results

    def _judge(self) -> None:
        one, other = self._rehearsals
        self._rehearsals, self._called = [], [*other.modules.values()]
        hazards = other.hazards + ([] if other.hazards else differences(one, other))
        if hazards:
            raise CaptureError(
                "ndtp.capture: the step cannot be captured as it is\n" + described(hazards) + "\n"
                "  fix: leave these to the code around the step, and give what changes as tensors; "
                "eager=True runs it as it is"
            )

    def _capture(self) -> None:
        count = len(self._keys.draws)
        self._drawn = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._keys.begin(self._drawn)
        self._optimizers.hold()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (NCCL's watchdog) may ask the driver things meanwhile: so not "global".
            with (
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
                CommMeter() as meter,
                Region(self._keys).entered(),
            ):
                self._results = self._run()
        except CaptureError:
            raise
        except (RuntimeError, IndexError) as error:
            raise CaptureError(f"ndtp.capture: the step could not be captured: {error}") from error
        finally:
            self._keys.rewind()
        self._optimizers.check_gradients()
        self._modules.hold(self._called)
        strange = [x for x in tree_flatten(self._results)[0] if not isinstance(x, (Tensor, type(None)))]
        if strange:
            raise CaptureError(
                f"ndtp.capture: the step returns {strange[0]!r}, which would stay so for ever\n  fix: return tensors"
            )
        self._graph, self.volume = graph, meter.volume

    def _replay(self) -> Any:
        self._optimizers.check_settings()
        self._modules.check()
        keys = self._keys.drawn()
        if keys:
            assert self._drawn is not None
            self._drawn.copy_(_pinned(keys), non_blocking=True)
        self._graph.replay()
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, self._results)


def _pinned(numbers: Sequence[int]) -> Tensor:
    """Numbers that the device can fetch while the host goes on; torch keeps their memory until then."""
    made = torch.tensor(numbers, device="cpu")
    return made.pin_memory() if torch.cuda.is_available() else made
