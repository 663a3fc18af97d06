"""`EinsumPlan`: a product with any letters, by the rule of products.  Pure.

A letter belongs to a class by the tensors that have it, and the role rule (`ndtp.algebra.roles`) reads on classes:

| letter is in | class | as in a product of matrices |
|---|---|---|
| C, and of the operands in A alone | m | rows of A |
| C, and in another operand alone | n | columns of B |
| C and several operands | batch | a batch dim |
| not in C | k | what is contracted, or summed away from one operand |

Nothing else changes.  What a result lacks a letter of is a sum over the axes of that letter, forward (C) and backward
(dA, dB) alike.  With one operand it is a reduction or a transposition, with every letter in C an elementwise operation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ndtp.algebra import roles as rule
from ndtp.algebra.cached import cached_property
from ndtp.algebra.layout import Layout
from ndtp.algebra.loop_nest import LoopNest
from ndtp.algebra.relayouts import MergePlan, RelayoutPlan, reduction_volume
from ndtp.algebra.steps import PlanMove
from ndtp.algebra.stored import Letters, Stored
from ndtp.algebra.volume import Volume
from ndtp.dtypes import Dtype
from ndtp.errors import LayoutError

Names = tuple[str, ...]
OPERANDS = "ABDEFGHIJKLMNOPQRSTUVWXYZ"  # C is the result


def parse(expression: str) -> tuple[tuple[Names, ...], Names]:
    """`"b m k, k n -> b m n"`: the letters of the operands, and those of the result.

    Raises:
        LayoutError: no such expression; a letter twice in a tensor, or in the result alone.
    """
    where = f"einsum '{expression}'"
    left, arrow, right = expression.partition("->")
    if not arrow:
        raise LayoutError(f"{where}: write what comes out, too, as in 'b m k, k n -> b m n'; '->' alone gives a number")
    operands, result = tuple(map(names_of, left.split(","))), names_of(right)
    for names in (*operands, result):
        if twice := [name for name in names if names.count(name) > 1]:
            raise LayoutError(
                f"{where}: {twice[0]} is named twice in '{' '.join(names)}'\n"
                "  fix: a name of its own for each dim; of a diagonal, take the elements before"
            )
    known = {name for names in operands for name in names}
    if lost := [name for name in result if name not in known]:
        raise LayoutError(f"{where}: {lost[0]} comes out, and no operand has it; they have {', '.join(sorted(known))}")
    return operands, result


def names_of(text: str) -> Names:
    """`"b m k"` as names of dims.

    Raises:
        LayoutError: a word that is no name.
    """
    names = tuple(text.split())
    for name in names:
        if not re.fullmatch(r"[^\W\d]\w*", name):
            raise LayoutError(
                f"'{text.strip()}': {name!r} is no name of a dim; write names with blanks between, 'b m k'"
            )
    return names


class EinsumPlan(LoopNest):
    """The plan of an einsum of operands that lie as `layouts` say.

    Args:
        expression: as `parse` reads it.
        layouts: of the operands as they are stored.
        shapes: their global shapes.  A dim of size 1 is broadcast where another operand has more of its letter.
        out: the layout in which C is wanted.  Default: the mirror, see `MatMulPlan`.
        roles: letters for axes that shall not follow the rule.
        name: what errors and profiles call it; default: the expression.

    Attributes:
        sizes: letter -> global size.
        result: the letters of C.

    Raises:
        LayoutError: an expression, layouts or shapes that make no product; layouts that the rule cannot multiply, with
            the nearest that it can; sizes that do not divide.
    """

    kind, padded_by = "Einsum", ""

    def __init__(
        self,
        expression: str,
        layouts: Sequence[Layout],
        shapes: Sequence[Sequence[int]],
        out: Layout | None = None,
        roles: Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        self.name = name or expression
        names, self.result = parse(expression)
        self._check_shapes(names, layouts, shapes, out)
        self.sizes = self._sizes(names, shapes)
        of = [
            Stored(OPERANDS[i], layout, self._letters(own, shape), named=True)
            for i, (own, layout, shape) in enumerate(zip(names, layouts, shapes, strict=True))
        ]
        self.classes = self._classes([operand.letters for operand in of])
        for axis, letter in (roles or {}).items():
            if axis not in layouts[0].grid or letter not in self.sizes:
                raise LayoutError(
                    f"{self.where}: roles={{{axis!r}: {letter!r}}} does not give an axis of grid {layouts[0].grid} "
                    f"one of the letters {', '.join(self.sizes)}"
                )
        self.roles = rule.assign(of, self.classes, roles or {})
        result = None if out is None else Stored("C", out, self.result, named=True)
        self.orders = {letter: rule.order(self.where, letter, self.roles, of, result) for letter in self.sizes}
        if result is None:
            layout = rule.mirror(of[0], self.result, self.classes, self.roles, self.orders)
            result = Stored("C", layout, self.result, named=True)
        self.stored = {tensor.name: tensor for tensor in (*of, result)}
        self.check_order()
        self.check_divides(self.sizes)

    # ----------------------------------------------------------------------------------------------- what is asked

    def _check_shapes(
        self, names: Sequence[Names], layouts: Sequence[Layout], shapes: Sequence[Sequence[int]], out: Layout | None
    ) -> None:
        if not len(names) == len(layouts) == len(shapes):
            raise LayoutError(f"{self.where}: it names {len(names)} operands, and there are {len(layouts)}")
        if len(names) > len(OPERANDS):
            raise LayoutError(f"{self.where}: {len(names)} operands; take {len(OPERANDS)} at once, or fewer")
        entries = [*zip(OPERANDS, names, layouts, map(len, shapes), strict=False)]
        entries += [] if out is None else [("C", self.result, out, len(self.result))]
        for tensor, own, layout, ndim in entries:
            if not len(own) == layout.ndim == ndim:
                raise LayoutError(
                    f"{self.where}: {tensor} is '{' '.join(own)}' there, has {ndim} dims and the layout {layout}"
                )
            if layout.grid != layouts[0].grid:
                raise LayoutError(
                    f"{self.where}: {tensor} lies on grid {layout.grid}, A on grid {layouts[0].grid}\n"
                    "  fix: ndtp.reshard, or `to` of what is mapped, brings a tensor to another grid"
                )

    def _sizes(self, names: Sequence[Names], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        found: dict[str, dict[str, int]] = {}
        for tensor, own, shape in zip(OPERANDS, names, shapes, strict=False):
            for letter, size in zip(own, shape, strict=True):
                found.setdefault(letter, {})[tensor] = int(size)
        sizes = {}
        for letter, of in found.items():
            wide = {size for size in of.values() if size != 1}
            if len(wide) > 1:
                texts = [f"{size} in {tensor}" for tensor, size in of.items()]
                raise LayoutError(
                    f"{self.where}: {letter} is {' and '.join(texts)}\n  fix: operands whose sizes of {letter} agree, "
                    "or another name for one of them"
                )
            sizes[letter] = wide.pop() if wide else 1
        return sizes

    def _letters(self, names: Names, shape: Sequence[int]) -> Letters:
        return tuple(
            None if size == 1 and self.sizes[name] != 1 else name for name, size in zip(names, shape, strict=True)
        )

    def _classes(self, operands: Sequence[Letters]) -> dict[str, str]:
        classes = {}
        for letter in self.sizes:
            having = [i for i, letters in enumerate(operands) if letter in letters]
            single = "m" if having == [0] else "n"
            classes[letter] = "k" if letter not in self.result else single if len(having) == 1 else "batch"
        return classes

    # --------------------------------------------------------------------------------------------- what comes of it

    @property
    def out(self) -> Layout:
        return self.stored["C"].layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of C."""
        return tuple(self.sizes[letter] for letter in self.result)

    @property
    def operand_names(self) -> Names:
        return tuple(name for name in self.stored if name != "C")

    @cached_property
    def ways(self) -> Mapping[str, RelayoutPlan]:
        """Operands on their way to where they are multiplied, and C from there: with their gradients' ways back."""
        found = {}
        for name, tensor in self.stored.items():
            held = Layout(self.grid, *self.need(tensor.letters))
            lacks = self.lacks(tensor.letters)
            if name == "C":
                found[name] = RelayoutPlan(held, tensor.layout, lacks, (), f"{self.name} C")
            else:
                found[name] = RelayoutPlan(tensor.layout, held, (), lacks, f"{self.name} {name}")
        return found

    def phases(self, wanted: Sequence[bool]) -> dict[str, str]:
        """The phase in which the gradient of each tensor moves: dC's is that of the first product of backward.

        Args:
            wanted: whether a gradient is, of each operand.
        """
        of = {name: "wgrad" if i else "dgrad" for i, name in enumerate(self.operand_names)}
        return of | {"C": "dgrad" if wanted[0] else "wgrad"}

    def moves(self, wanted: Sequence[bool] | None = None) -> tuple[PlanMove, ...]:
        """List the tensors that move, with their phases and steps, in the order in which they move.

        Args:
            wanted: whether a gradient is, of each operand; default: of all.
        """
        wanted = [True] * len(self.operand_names) if wanted is None else wanted
        phases = self.phases(wanted)
        found = [("forward", name) for name in self.stored]
        back = [name for name, want in zip(self.operand_names, wanted, strict=True) if want]
        found += [(phases[name], f"d{name}") for name in (["C"] if back else []) + back]
        return tuple(PlanMove(phase, name, self.relayouts[name]) for phase, name in found)

    def volume(self, wanted: Sequence[bool] | None = None, dtype: Dtype = "float32") -> Volume:
        """The exact traffic, in bytes of a dtype received per rank, `wanted` gradients included."""
        return self.volume_of(self.moves(wanted), self.sizes, dtype)

    def __str__(self) -> str:
        moves = self.moves([False] * len(self.operand_names))
        steps = [str(step).format(move.tensor) for move in moves for step in move.steps]
        return f"{self.equation}: {', '.join(steps) if steps else 'no communication'}"


def elementwise(operands: Sequence[Names]) -> str:
    """The expression of an operation on elements that dims of one name share: `"b m k, k -> b m k"`.

    The result has the dims of the first operand that has all of them; if none has, those of each in turn.
    """
    union = list(dict.fromkeys(name for names in operands for name in names))
    result = next((names for names in operands if len(names) == len(union)), union)
    return f"{', '.join(map(' '.join, operands))} -> {' '.join(result)}"


@dataclass(frozen=True)
class ExtremePlan:
    """The plan of a maximum or minimum, of which nobody can send parts of a sum: ranks merge those of their parts.

    Args:
        plan: of the sum over the same letters, whose result is not split over their axes.
    """

    plan: EinsumPlan

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that the reduction removes."""
        return tuple(dim for dim, letter in enumerate(self.plan.stored["A"].letters) if letter not in self.plan.result)

    @cached_property
    def merge(self) -> MergePlan:
        return MergePlan(self.plan.grid, self.plan.lacks(self.plan.result), 1, 1)

    def volume(self, dgrad: bool = True, dtype: Dtype = "float32") -> Volume:
        """The exact traffic, in bytes received per rank.  Backward counts the elements that share an extreme.

        Args:
            dgrad: whether the gradient is wanted.
            dtype: of the operand.
        """
        shape = self.plan.held_shape(self.plan.result, self.plan.sizes)
        there = self.merge.volume(prod(shape), dtype)
        return there + reduction_volume(self.plan.grid, self.merge.axes, shape, "dgrad", dtype) if dgrad else there
