"""`RingPlan`: attention of one sequence over ranks that pass their keys and values on.  Pure.

Each rank keeps its queries.  In as many turns as there are ranks it attends to the keys that it has, and passes them on
beside that product.  Backward passes keys and values round once more, and with them their gradients, which end where
they belong.  No rank ever has more than two parts of keys and values.

Where attention is causal, a rank in front would have little to do.  So each rank swaps the second half of its part with
the rank that is as far from the other end.  Each has an early and a late half then, and as many pairs of a query and a
key in every turn as all the others (zigzag order).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ndtp.algebra.attention_pieces import AttentionPiece, pieces
from ndtp.algebra.cached import cached_property
from ndtp.algebra.grid import Grid
from ndtp.algebra.steps import Step
from ndtp.algebra.volume import Traffic, Volume
from ndtp.algebra.wire import Wire, message_bytes
from ndtp.dtypes import Dtype, name_of, size_of


@dataclass(frozen=True)
class RingPlan:
    """The turns of one attention.

    Args:
        grid, axes: the ranks along these axes have consecutive parts of the sequence.
        length: of the sequence.
        part: the positions of a rank, padding behind the sequence included.
        is_causal: whether a query sees no key behind its own.
    """

    grid: Grid
    axes: tuple[str, ...]
    length: int
    part: int
    is_causal: bool

    @property
    def ranks(self) -> int:
        return self.grid.size(self.axes)

    @property
    def is_zigzag(self) -> bool:
        """Return whether halves are swapped, so that causal work is equal."""
        return self.is_causal and self.ranks % 2 == 0 and self.part > 1

    @property
    def pass_on(self) -> Step:
        return Step("pass_on", self.axes)

    @property
    def swap(self) -> Step:
        return Step("swap_ends", self.axes)

    @cached_property
    def half(self) -> int:
        """Return the first of a rank's positions that it swaps."""
        return self.part // 2

    def positions(self, index: int) -> list[range]:
        """Return the positions of one of the ranks' parts, in its order, while they attend."""
        start = index * self.part
        if not self.is_zigzag:
            return [range(start, start + self.part)]
        other = (self.ranks - 1 - index) * self.part
        return [range(start, start + self.half), range(other + self.half, other + self.part)]

    def source(self, index: int, turn: int) -> int:
        """Return the rank whose keys one of the ranks has in a turn."""
        return (index - turn) % self.ranks

    def pieces(self, index: int, turn: int) -> list[AttentionPiece]:
        """Return the work of one of the ranks in a turn."""
        keys = self.positions(self.source(index, turn))
        return pieces(self.positions(index), keys, self.length, self.is_causal)

    def work(self, index: int) -> list[int]:
        """Return the pairs of a query and a key that one of the ranks multiplies, turn by turn."""
        return [sum(piece.work for piece in self.pieces(index, turn)) for turn in range(self.ranks)]

    def volume(
        self, q: Sequence[int], k: Sequence[int], v: Sequence[int], dtype: Dtype, wide: Dtype, backward: bool = True,
        wire: Wire | None = None,
    ) -> Volume:  # fmt: skip
        """Return the bytes that a rank receives.

        Args:
            q, k, v: local shapes, [.., part, features].
            dtype, wide: of the tensors, and of the gradients that are added up on their way.
            backward: whether there is one.
            wire: the dtypes in which tensors travel; the gradients that are added up on their way do as they are.
        """
        swapped = self.part - self.half if self.is_zigzag else 0
        out = (*q[:-1], v[-1])

        def message(phase: str, kind: str, shapes: Sequence[Sequence[int]], turns: int, rows: int) -> Traffic:
            of = "activations" if phase == "forward" or kind == "pass_on" else "activation_gradients"
            form, size = None if wire is None else wire.format(of), size_of(dtype)
            cut = [(*shape[:-2], rows, shape[-1]) for shape in shapes]
            of_each = [turns * message_bytes(shape, size, form) for shape in cut]
            name = name_of(dtype) if form is None else form.name
            return Traffic(phase, kind, self.axes, sum(of_each), turns * sum(map(math.prod, cut)), dtype=name)

        turns, sums = self.ranks - 1, self.ranks * (self.ranks > 1)
        found = [
            message("forward", "pass_on", (k, v), turns, self.part),
            message("forward", "swap_ends", (q, k, v, out), 1, swapped),
        ]
        if backward:
            count = sums * (math.prod(k) + math.prod(v))
            found += [
                message("dgrad", "pass_on", (k, v), turns, self.part),
                message("dgrad", "swap_ends", (out, q, k, v), 1, swapped),
                Traffic("dgrad", "pass_on", self.axes, count * size_of(wide), count, dtype=name_of(wide)),
            ]
        return Volume.of(found)
