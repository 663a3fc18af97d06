"""Calls that were made before: their checks, choice and compiled kernels are kept, under all that these depend on.

What is left of such a call is to allocate its results, to put tensors into their places, and to launch.  A call is kept
when each tensor that its kernels see is an operand as it came, a result, or scratch; one that has to copy an operand
is prepared anew each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtp_kernels.choice.table import default_table
from ndtp_kernels.launch import Launch, allocate_on

# Names of the kernels' tensors; a call's are listed in this order, None where it has no such tensor.
NAMES = ("A", "B", "C", "aux", "pre", "bias", "X")
LIMIT = 4096


class Start(NamedTuple):
    """One launch: `run` takes `values`, with tensors put in at `places` (position, number in the call's list)."""

    run: Callable[..., Any]
    values: list[Any]
    places: tuple[tuple[int, int], ...]


class Known(NamedTuple):
    """A call as it is repeated; without `starts`, torch is to do it."""

    starts: tuple[Start, ...] = ()
    c_shape: tuple[int, ...] = ()
    pre_shape: tuple[int, ...] = ()  # where it is another one
    out_dtype: torch.dtype = torch.float32
    scratch: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    descriptors: bool = False
    traced: tuple[Any, ...] = ()  # the arguments of `tracing.record`

    def run(self, tensors: list[Tensor | None], first: Tensor) -> None:
        """Launch on the current stream of the device of `first`."""
        made = [first.new_empty(shape, dtype=dtype) for shape, dtype in self.scratch]
        given = [*tensors, *made] if made else tensors
        if not first.is_cuda:
            self._start(given)
            return
        device = first.device
        if device.index in (None, torch.cuda.current_device()):
            self._start(given, stream=self._ready(device))
        else:
            with torch.cuda.device(device):
                self._start(given, stream=self._ready(device))

    def _ready(self, device: torch.device) -> int:
        """The stream to launch on; scratch for descriptors can be had from now on."""
        import triton

        if self.descriptors:  # a context variable, which autograd's threads do not inherit
            triton.set_allocator(allocator(device))
        index = torch.cuda.current_device() if device.index is None else device.index
        return int(triton.runtime.driver.active.get_current_stream(index))

    def _start(self, given: Sequence[Tensor | None], **keywords: int) -> None:
        for run, values, places in self.starts:
            values = values.copy()
            for position, number in places:
                values[position] = given[number]
            run(*values, **keywords)


allocator = functools.cache(allocate_on)
_known: dict[Any, Known] = {}


def key(operands: Sequence[Tensor | None], *how: object) -> object:
    """All that the launches of a call depend on."""
    first = operands[0]
    assert first is not None
    tensors = tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in operands])
    return how, default_table(), first.device, tensors


def recall(found: object) -> Known | None:
    return None if found is None else _known.get(found)


def forget() -> None:
    """All that was kept, as when the table has changed."""
    _known.clear()


def keep(found: Any, known: Known | None) -> None:
    if found is None or known is None:
        return
    if len(_known) >= LIMIT:
        _known.clear()
    _known[found] = known


def prepared(
    launches: Sequence[Launch], tensors: Sequence[Tensor | None], made: Sequence[Tensor], **facts: Any
) -> Known | None:
    """Return what is kept of launches that have run; None where one of them saw a copy of an operand.

    Args:
        tensors: the call's, in the order of NAMES.
        made: scratch.
        facts: other fields of `Known`.
    """
    starts = []
    for launch in launches:
        run, names = launch.again(), launch.kernel.arg_names
        values = [launch.arguments.get(name, launch.constants.get(name)) for name in names]
        places = []
        for position, (name, value) in enumerate(zip(names, values, strict=True)):
            if not isinstance(value, Tensor):
                continue
            own = tensors[NAMES.index(name)] if name in NAMES else None
            if own is not None and _same_memory(own, value):
                places.append((position, NAMES.index(name)))
            else:
                number = next((at for at, each in enumerate(made) if _same_memory(each, value)), None)
                if number is None:
                    return None
                places.append((position, len(NAMES) + number))
            values[position] = None  # a call that is kept keeps no tensor alive
        starts.append(Start(run, values, tuple(places)))
    return Known(tuple(starts), scratch=tuple((tuple(each.shape), each.dtype) for each in made), **facts)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether a kernel may take either tensor, since it sees only an address and a dtype."""
    return one is other or (one.data_ptr() == other.data_ptr() and one.dtype == other.dtype)
