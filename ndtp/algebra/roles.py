"""The role rule: which letter of a product's loop nest every axis splits, in which order, and where C lies.  Pure.

Every axis splits one *letter* (batch, m, n or k), or none; the operands decide, by one rule, read top to bottom:

| axis g splits ... | role | an operand that stores something else over g ... |
|---|---|---|
| N of B | n | A, if split by g, is gathered over g |
| else M of A | m | B, if split by g, is gathered over g |
| else a batch dim of A or of B | batch | is gathered; one that is replicated slices; one that lacks the dim is whole |
| else K of A or of B | k | one that is replicated slices; each rank holds a partial sum of C |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ndtp.algebra import refusals
from ndtp.algebra.layout import Layout
from ndtp.algebra.stored import Letters, Stored, equation

Orders = Mapping[str, tuple[str, ...]]

_RANK = {"n": 0, "m": 1, "batch": 2, "k": 3}


def batch_letters(count: int) -> tuple[str, ...]:
    return ("batch",) if count == 1 else tuple(f"batch{i}" for i in range(count))


def letters_of(batch: Sequence[str], ndim: int, units: Sequence[int], last: Letters) -> Letters:
    """The letters of an operand of `ndim` dims: batch dims, aligned from the right and None at `units`, and `last`."""
    own = batch[len(batch) - (ndim - 2) :]
    return (*(None if dim in units else letter for dim, letter in enumerate(own)), *last)


def assign(operands: Sequence[Stored], classes: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Axis -> letter, for the axes that have one; `overrides` go before the rule.

    Args:
        classes: letter -> which row of the table it belongs to: "n", "m", "batch" or "k".
    """
    roles = {}
    for axis in operands[0].layout.grid:
        split = [letter for operand in operands if (letter := operand.letter_of(axis))]
        if axis in overrides:
            roles[axis] = overrides[axis]
        elif split:  # of two letters of one class A's, which comes first
            roles[axis] = min(split, key=lambda letter: _RANK[classes[letter]])
    return roles


def order(
    where: str, letter: str, roles: Mapping[str, str], operands: Sequence[Stored], result: Stored | None
) -> tuple[str, ...]:
    """The axes that split a letter, major to minor: the order in which the tensors store them.

    Args:
        where: how errors begin.
        result: C, if its layout is given.

    Raises:
        LayoutError: the tensors disagree; names the layout that would agree.
    """
    tensors = [*operands, *([] if result is None else [result])]
    grid = tensors[0].layout.grid
    wanted = [axis for axis in grid if roles.get(axis) == letter]
    stored = [tuple(axis for axis in tensor.axes_of(letter) if axis in wanted) for tensor in tensors]
    # Axes of one rank stand in no order: the sequence to agree with is the one with the most axes that split.
    longest = max(stored, key=lambda axes: (len(grid.nontrivial(axes)), len(axes)))
    for tensor, axes in zip(tensors, stored, strict=True):
        lead = grid.nontrivial(axes)
        if lead != grid.nontrivial(longest)[: len(lead)]:
            fixed = (*longest, *(axis for axis in axes if axis not in longest))
            rest = [axis for axis in tensor.axes_of(letter) if axis not in fixed]
            dims = [
                (*fixed, *rest) if own == letter else tuple(axis for axis in split if axis not in fixed)
                for own, split in zip(tensor.letters, tensor.layout.dims, strict=True)
            ]
            near = tensor.layout.with_dims(*dims)
            raise refusals.order(where, f"{equation(operands)} on grid {grid}", tensor, letter, near)
    return (*longest, *(axis for axis in wanted if axis not in longest))


def mirror(
    a: Stored, c_letters: Sequence[str], classes: Mapping[str, str], roles: Mapping[str, str], orders: Orders
) -> Layout:
    """The default layout of C: where A gave up an axis by gathering, C takes the axes of K, as minors.

    On M if A gave it up there, else on a batch dim, else on N; of several letters of a class, on C's first.
    """
    dims = [list(orders[letter]) for letter in c_letters]
    m, batch, n = ([letter for letter in c_letters if classes[letter] == each] for each in ("m", "batch", "n"))
    gave = set()
    for axes, letter in zip(a.layout.dims, a.letters, strict=True):
        if letter and any(roles.get(axis) not in a.letters for axis in axes):
            gave |= set(n[:1]) if classes[letter] == "k" else {letter}
    target = next((letter for letter in (*m, *batch, *n) if letter in gave), None)
    if target is not None:
        dims[c_letters.index(target)] += [
            axis for letter in orders if classes[letter] == "k" for axis in orders[letter]
        ]
    return Layout(a.layout.grid, *dims)
