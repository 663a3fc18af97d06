"""A step that is captured whole: what is started inside is taken inside, and what the host draws is drawn per call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ndtp.collectives.streams import is_capturing

if TYPE_CHECKING:
    from ndtp.collectives.collectives import Collectives

_UNDER_WAY: list[Region] = []  # one at a time: CUDA captures one graph at a time, and backward runs in another thread


class _Settles(Protocol):
    def settle(self) -> None: ...


class Region:
    """One whole step: a rehearsal of it, or its capture.

    Attributes:
        keys: the random keys of the step; None: they are drawn as ever, and none was counted.
        compares: whether ranks may compare their calls, which takes the host.
    """

    def __init__(self, keys: KeyTape, compares: bool = False) -> None:
        self.keys, self.compares = keys, compares
        self._touched: list[_Settles] = []

    def touch(self, part: _Settles) -> None:
        """Know something that may be left under way when the step ends."""
        if part not in self._touched:
            self._touched.append(part)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The step runs here; what it has left under way is waited for at its end."""
        _UNDER_WAY.append(self)
        try:
            yield
            for part in self._touched:
                part.settle()
        finally:
            _UNDER_WAY.remove(self)


def region_under_way() -> Region | None:
    """Return the step that is captured whole, if one is."""
    return _UNDER_WAY[-1] if _UNDER_WAY else None


def is_in_graph(collectives: Collectives) -> bool:
    """Return whether what is issued now is, or will be, in a graph, which takes no time of the host."""
    if not collectives.orders_by_stream:
        return False
    return bool(_UNDER_WAY) or is_capturing(collectives.groups.device_type)


def may_start_ahead(device_type: str) -> bool:
    """Return whether something may be started now that is waited for later: inside of the same graph, if of any."""
    return bool(_UNDER_WAY) or not is_capturing(device_type)


def key_of_step(draw: Callable[[], int], device: torch.device) -> int | Tensor:
    """Return a random key: drawn in the host, or as a tensor that each replay of a graph finds drawn anew.

    In a graph of which ndtp knows nothing but that it is captured, the device's generator draws it, which torch
    registers with every graph.
    """
    region = region_under_way()
    if region is not None:
        return region.keys.key(draw, device)
    return torch.randint(2**32, (), device=device) if is_capturing(device.type) else draw()


def may_compare(device_type: str) -> bool:
    """Return whether ranks may compare by the host what they do: a replay would not."""
    if _UNDER_WAY:
        return _UNDER_WAY[-1].compares
    return device_type == "cpu" or not is_capturing(device_type)


class KeyTape:
    """The random keys of a step, in the order in which it draws them.

    A replay draws nothing in the host.  So the keys of a captured step lie on the device, in one tensor, and are drawn
    before each replay, by the same calls of torch's default generator by which the step would draw them.

    Attributes:
        draws: what draws each of them.
    """

    def __init__(self) -> None:
        self.draws: list[Callable[[], int]] = []
        self._states: dict[bytes, int] = {}
        self._memory: Tensor | None = None
        self._begun = torch.empty(0)

    def begin(self, memory: Tensor | None = None) -> None:
        """Begin to count keys anew.

        Args:
            memory: [keys] int64 on the device, where they will lie; None: each is a tensor of its own.
        """
        self.draws, self._states, self._memory = [], {}, memory
        self._begun = torch.get_rng_state()

    def key(self, draw: Callable[[], int], device: torch.device) -> Tensor:
        """Return the next key, as a tensor; where a checkpointed forward goes back to draw again, the one of then."""
        state = torch.get_rng_state().numpy().tobytes()
        at = self._states.get(state)
        with _disable_current_modes():  # the host's own arithmetic
            number = draw()
        if at is None:
            at = self._states[state] = len(self.draws)
            self.draws.append(draw)
        return torch.tensor(number, device=device) if self._memory is None else self._memory[at]

    def rewind(self) -> None:
        """Have torch's generator as it was at the beginning."""
        torch.set_rng_state(self._begun)

    def drawn(self) -> list[int]:
        """Draw the keys of a step."""
        with _disable_current_modes():
            return [draw() for draw in self.draws]
