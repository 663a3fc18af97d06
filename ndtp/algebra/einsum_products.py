"""Einsums that are products of matrices, batched or not, in other words: these run as such, overlapped.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ndtp.algebra import roles as rule
from ndtp.algebra.einsum import EinsumPlan
from ndtp.algebra.layout import Layout
from ndtp.algebra.loop_nest import LoopNest
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.stored import Stored

LetterGroups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class ProductForm:
    """An einsum as `plan`, of operands whose dims are put in another order and taken together.

    Attributes:
        a, b, c: the letters of A, B and C that make each dim of the product's.
    """

    plan: MatMulPlan
    a: LetterGroups
    b: LetterGroups
    c: LetterGroups


def product_form(plan: EinsumPlan, chunks: int | str = 0) -> ProductForm | None:
    """The product of matrices that an einsum of two operands is, with the same moves; None if it is none.

    Letters of a class are taken together as one, the one that is split first: its blocks are then blocks of all of
    them.  An einsum is none where two letters of a class are split, a letter is broadcast or summed away from one
    operand, or axes that trade places would move otherwise because the dims come in another order.

    Args:
        chunks: as for `MatMulPlan`.
    """
    if plan.operand_names != ("A", "B"):
        return None
    a, b, c = (plan.stored[name] for name in "ABC")
    of = {each: [letter for letter in plan.sizes if plan.classes[letter] == each] for each in ("batch", "m", "n", "k")}
    if None in (*a.letters, *b.letters) or any(
        letter not in a.letters or letter not in b.letters for letter in of["k"]
    ):
        return None
    batch = tuple(letter for letter in plan.result if plan.classes[letter] == "batch")
    groups = {}
    for each in ("m", "n", "k"):
        split = [letter for letter in of[each] if any(tensor.axes_of(letter) for tensor in (a, b, c))]
        if len(split) > 1:
            return None
        groups[each] = tuple(sorted(of[each], key=lambda letter: letter not in split))
    single = tuple((letter,) for letter in batch)
    m, n, k = (groups[each] for each in ("m", "n", "k"))
    transpose_a, transpose_b = _precedes(a, k, m), _precedes(b, n, k)
    a_groups, b_groups = (
        (*single, *((k, m) if transpose_a else (m, k))),
        (*single, *((n, k) if transpose_b else (k, n))),
    )
    names = dict(zip(batch, rule.batch_letters(len(batch)), strict=True))
    names |= {letter: each for each, letters in groups.items() for letter in letters}
    product = MatMulPlan(
        _layout(a, a_groups),
        _layout(b, b_groups),
        _layout(c, (*single, m, n)),
        roles={axis: names[letter] for axis, letter in plan.roles.items()},
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        chunks=chunks,
        name=plan.name,
    )
    if any(_kinds(product, name) != _kinds(plan, name) for name in plan.relayouts):
        return None
    return ProductForm(product, a_groups, b_groups, (*single, m, n))


def _kinds(plan: LoopNest, name: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(step.kind, step.axes) for step in plan.relayouts[name]]


def _precedes(tensor: Stored, first: Sequence[str], second: Sequence[str]) -> bool:
    return bool(first and second) and tensor.letters.index(first[0]) < tensor.letters.index(second[0])


def _layout(tensor: Stored, groups: LetterGroups) -> Layout:
    return Layout(tensor.layout.grid, *(tensor.axes_of(group[0]) if group else () for group in groups))
