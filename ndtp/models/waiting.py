"""`Call`: layers that were called, and are computed when it is known what becomes of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.errors import LayoutError
from ndtp.models.hidden import Hidden, leave
from ndtp.models.kept_logits import KeptWeights
from ndtp.models.seen_weights import SeenWeights, as_frozen, bare, with_weights
from ndtp.runtime.versions import version_of
from ndtp.runtime.waiting_calls import wait_with
from ndtp.split.copies import version_of as version_of_split

if TYPE_CHECKING:
    from ndtp.models.projections import Projection


@dataclass(eq=False)
class Call:
    """Projections of one input, and how things stood when they were called.

    Attributes:
        source: their input, as their plan has it; `given` as it came.
        compute: gives what each of them does, as one product.
        loss: (of a head) the cross entropy of what it gives, or `NotImplemented`.
        kept: (of a head) its weights, where they are about to change.
        asked: those that were called so far.
        is_noted: whether anything was noted of what they give; then a write to that is not to reach the notes.
        is_taken: whether they were computed as a part of one program with what follows.
        feeds_loss: whether a loss was taken of what they give.
    """

    members: tuple[Projection, ...]
    source: Hidden
    compute: Callable[[Sequence[Projection], Hidden], list[Tensor]]
    given: Any = None
    loss: Callable[..., Any] | None = None
    kept: KeptWeights | None = None
    is_noted: bool = False
    is_taken: bool = False
    feeds_loss: bool = False

    def __post_init__(self) -> None:
        self.device = "cpu" if self.source.is_meta else self.source.device.type
        self.state = _state(self.device)
        self.asked: set[int] = set()
        self.values: list[Hidden] | None = None
        self.seen = [(m, key, p) for m in self.members for key, p in m._parameters.items()]
        self.watched = [(x, version_of(x)) for x in (leave(self.source), *map(bare, self._weights()))]
        self.weights = SeenWeights(self.members)
        self.then = self.weights.now()
        wait_with(self, self._weights())

    def _weights(self) -> Iterator[Tensor]:
        return (p for _, _, p in self.seen if p is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the projections' results."""
        _, is_cast, cast = self.state
        given = self.source.dtype
        return cast if is_cast and given != torch.float64 else given

    @property
    def is_now(self) -> bool:
        """Return whether computing now gives what computing at the call would have given."""
        return _state(self.device) == self.state

    def take(self) -> bool:
        """Return whether what follows may compute them now as a part of one program: nothing has changed since they
        were called, neither their input nor their weights.
        """
        source, version = self.watched[0]
        self.is_taken = self.is_now and version_of(source) == version and self.weights.now()[:3] == self.then[:3]
        return self.is_taken

    def settle(self) -> None:
        """Compute them, unless they were."""
        source, version = self.watched[0]
        if self.values is None and not self.is_taken and version_of(source) == version:
            with self.as_then():
                self.value(self.members[0])

    @contextmanager
    def as_then(self) -> Iterator[None]:
        has_grad, is_cast, cast = self.state
        with torch.set_grad_enabled(has_grad), torch.autocast(self.device, cast, enabled=is_cast):
            yield

    @property
    def losses(self) -> Any:
        """Return what is to know of a loss of them, if anything is."""
        return self.members[0].frame

    def given_by(self, member: Projection, y: Tensor) -> Hidden:
        """Return the result as the model's code gets it."""
        return member.as_given(y, self.source.passage)

    def value(self, member: Projection) -> Hidden:
        """Return a projection's result, computed.

        Raises:
            LayoutError: its weights have changed since it was called.
        """
        if self.values is None:
            self.values = self._computed(member)
            if self.kept is not None:
                self.kept.done()
            self.versions = [version_of_split(x) for x in self.values] if self.is_noted else []
        return self.values[self.members.index(member)]

    def _computed(self, member: Projection) -> list[Hidden]:
        changed = [(x, version) for x, version in self.watched if version_of(x) != version]
        for x, version in changed:
            if self.kept is None or not self.kept.has(x, version):
                raise LayoutError(
                    f"'{member.name}': what it gave is asked for after its input or weights, {tuple(x.shape)}, were "
                    "changed by other than an optimizer; it was not computed before\n"
                    "  fix: ask for it first, or parallelize(..., fuse=False)"
                )
        then = [each for each in self.seen if each[0]._parameters.get(each[1]) is not each[2]]
        kept = self.kept.as_then() if changed and self.kept is not None else nullcontext()
        with (
            with_weights(then),
            as_frozen(self.then),
            kept,
        ):
            made = self.compute(self.members, self.source)
            return [self.given_by(m, y) for m, y in zip(self.members, made, strict=True)]

    def is_unwritten(self, index: int) -> bool:
        """Return whether a projection's result is what it gave: not computed yet, or not written to since."""
        return self.values is None or version_of_split(self.values[index]) == self.versions[index]

    def as_given(self, index: int) -> Hidden:
        """Return a projection's result as it gave it, computed anew."""
        return self._computed(self.members[index])[index]


def _state(device: str) -> tuple[bool, bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
