"""`LoopNest`: what all products of laid-out tensors share, however many letters and operands they have.  Pure.

A product runs over a nest of loops, one a *letter*.  Every axis of the grid splits one of them, or none; so every
tensor is held, while it is multiplied, as the axes of its own letters say, and a result that lacks a letter is a sum
over its axes of which each rank has a part.  From there to how tensors are stored, and back for their gradients, it is
the table of `ndtp.algebra.steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import lcm
from typing import ClassVar

from ndtp.algebra import refusals
from ndtp.algebra.cached import cached_property
from ndtp.algebra.grid import Grid
from ndtp.algebra.steps import Dims, Journey, PlanMove, Step, is_legal, relayout_steps
from ndtp.algebra.stored import Letters, Stored, equation
from ndtp.algebra.volume import Traffic, Volume, traffic
from ndtp.algebra.wire import KINDS, Wire
from ndtp.dtypes import Dtype


class LoopNest:
    """The axes of a product's letters, and the ways of its tensors.

    Attributes:
        name: what errors and profiles call it.
        roles: axis -> letter, for the axes that have one.
        orders: letter -> the axes that split it, major to minor.
        stored: the operands and then the result "C", each with its layout and the letters of its dims.
    """

    name: str
    roles: Mapping[str, str]
    orders: Mapping[str, tuple[str, ...]]
    stored: Mapping[str, Stored]

    kind: ClassVar[str] = "MatMul"
    padded_by: ClassVar[str] = " with pad=True"

    @property
    def where(self) -> str:
        """The words with which errors about this product begin."""
        return f"{self.kind} '{self.name}'"

    @property
    def grid(self) -> Grid:
        return self.stored["C"].layout.grid

    def need(self, letters: Letters) -> Dims:
        """Return how a tensor with these letters is held while it is multiplied."""
        return tuple(self.orders[letter] if letter else () for letter in letters)

    def lacks(self, letters: Letters) -> tuple[str, ...]:
        """The axes of letters that a tensor has not: as a result it is an unreduced sum over them."""
        return tuple(axis for axis, letter in self.roles.items() if letter not in letters)

    def check_order(self) -> None:
        """Refuse layouts in which a gathered or scattered axis is not the minor one of its dim.

        Raises:
            LayoutError: the tensor, the axis, and an order that works.
        """
        for tensor in self.stored.values():
            need = self.need(tensor.letters)
            if not is_legal(self.grid, tensor.layout.dims, need):
                raise refusals.contiguity(self.where, self.operands, tensor, need)

    # ----------------------------------------------------------------------------------------------------- moves

    @cached_property
    def journeys(self) -> Mapping[str, Journey]:
        """The dims of every tensor before and after its steps, by name: A, B, C, dC, dA, dB.

        Operands go from stored to held, results back, and gradients the other way; what a result lacks a letter of is
        a partial sum over the axes of that letter.
        """
        return self._journeys()

    def _journeys(self) -> dict[str, Journey]:
        found = {}
        for name, tensor in self.stored.items():
            letters, lies, need = tensor.letters, tensor.layout.dims, self.need(tensor.letters)
            to, back = (name, f"d{name}") if name != "C" else ("dC", "C")
            found[to] = Journey(letters, lies, need)
            found[back] = Journey(letters, need, lies, self.lacks(letters))
        return found

    @cached_property
    def relayouts(self) -> Mapping[str, tuple[Step, ...]]:
        """The steps of every tensor, by the names of `journeys`."""
        return {
            name: relayout_steps(self.grid, journey.begin, journey.end, journey.partial)
            for name, journey in self.journeys.items()
        }

    def volume_of(
        self, moves: Iterable[PlanMove], sizes: Mapping[str, int], dtype: Dtype, wire: Wire | None = None
    ) -> Volume:
        """The exact traffic of moves, in bytes received per rank.

        An all-gather or reduce-scatter whose gathered size is V over p ranks takes V (p-1)/p, an all-to-all of a local
        V the same, an all-reduce twice that.

        Args:
            sizes: letter -> global size.
            dtype: in which the tensors are computed.
            wire: in which dtypes they travel instead.
        """
        return Volume.of(entry for move in moves for entry in self.traffic_of(move, sizes, dtype, wire))

    def traffic_of(
        self, move: PlanMove, sizes: Mapping[str, int], dtype: Dtype, wire: Wire | None = None
    ) -> Iterator[Traffic]:
        """The traffic of one move; arguments as for `volume_of`."""
        form = None if wire is None else wire.format(KINDS.get(move.tensor))
        shape = self.start_shape(move.tensor, sizes)
        return traffic(self.grid, move.steps, shape, move.phase, f"{self.name} {move.tensor}", dtype, form)

    # --------------------------------------------------------------------------------------------------- shapes

    def start_shape(self, tensor: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Every rank's part of a tensor, by its name in `journeys`, before its first step.

        Args:
            sizes: letter -> global size.
        """
        journey = self.journeys[tensor]
        return self._local(journey.letters, journey.begin, sizes)

    def held_shape(self, letters: Letters, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Every rank's part of a tensor with these letters while it is multiplied."""
        return self._local(letters, self.need(letters), sizes)

    def _local(self, letters: Letters, dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
        split = zip(letters, dims, strict=True)
        return tuple((sizes[letter] if letter else 1) // self.grid.size(axes) for letter, axes in split)

    def shard_shape(self, tensor: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of every rank's shard of an operand, or of "C"."""
        stored = self.stored[tensor]
        return stored.layout.shard_shape(stored.shape(sizes))

    def check_divides(self, sizes: Mapping[str, int]) -> None:
        """Refuse sizes that axes do not divide.

        Raises:
            LayoutError: a letter's size, the axes that do not divide it, and the nearest sizes that they divide.
        """
        for tensor, letter, axes in self._splits():
            size = sizes[letter] if letter else 1
            if size % self.grid.size(axes):
                split = {axis: self.grid[axis] for axis in axes}
                padded = f"{-(-size // (whole := self.granularity(letter))) * whole}{self.padded_by}"
                raise refusals.size(self.where, self.operands, tensor, tensor.shape(sizes), letter, size, split, padded)

    def granularity(self, letter: str | None) -> int:
        """Return the integer that the size of a letter has to be a multiple of."""
        return lcm(*(self.grid.size(axes) for _, own, axes in self._splits() if own == letter))

    def _splits(self) -> Iterator[tuple[Stored, str | None, tuple[str, ...]]]:
        """Every way in which a dim of a tensor is split, as it is stored and as it is multiplied."""
        *operands, result = self.stored.values()
        for tensor in (*reversed(operands), result):  # weights first
            for letter, *splits in zip(tensor.letters, tensor.layout.dims, self.need(tensor.letters), strict=True):
                yield from ((tensor, letter, axes) for axes in splits)

    # -------------------------------------------------------------------------------------------------- printing

    @property
    def equation(self) -> str:
        """The equation with layouts: `A[M_zy, K_x] . B[K_xz, N_y] -> C[M_zx, N_y]`."""
        *operands, result = self.stored.values()
        return f"{equation(operands)} -> {result}"

    @property
    def operands(self) -> str:
        """The operands and the grid: `A[M_zy, K_x] . B[K_xz, N_y] on grid z=2 x=2 y=2`."""
        *operands, result = self.stored.values()
        return f"{equation(operands)} on grid {result.layout.grid}"
