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
from dataclasses import dataclass

from ndtp.algebra import refusals
from ndtp.algebra.layout import Layout
from ndtp.algebra.refusals import shown

Letters = tuple[str | None, ...]
Orders = Mapping[str, tuple[str, ...]]

_RANK = {"n": 0, "m": 1, "k": 3}  # batch letters lie between m and k


@dataclass(frozen=True)
class Stored:
    """A tensor of a product as it is stored.

    Attributes:
        name: "A", "B" or "C".
        letters: of its dims; None for a dim of size 1 that is broadcast.
    """

    name: str
    layout: Layout
    letters: Letters

    def letter_of(self, axis: str) -> str | None:
        """The letter that an axis splits here."""
        dim = self.layout.dim_of(axis)
        return None if dim is None else self.letters[dim]

    def axes_of(self, letter: str) -> tuple[str, ...]:
        """The axes that split a letter here, major to minor."""
        return self.layout.dims[self.letters.index(letter)] if letter in self.letters else ()

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The global shape, from the global size of every letter."""
        return tuple(sizes[letter] if letter else 1 for letter in self.letters)

    def __str__(self) -> str:
        return f"{self.name}[{self.layout.label([shown(letter) for letter in self.letters])}]"


def batch_letters(count: int) -> tuple[str, ...]:
    return ("batch",) if count == 1 else tuple(f"batch{i}" for i in range(count))


def letters_of(batch: Sequence[str], ndim: int, units: Sequence[int], last: Letters) -> Letters:
    """The letters of an operand of `ndim` dims: batch dims, aligned from the right and None at `units`, and `last`."""
    own = batch[len(batch) - (ndim - 2) :]
    return (*(None if dim in units else letter for dim, letter in enumerate(own)), *last)


def assign(a: Stored, b: Stored, overrides: Mapping[str, str]) -> dict[str, str]:
    """Axis -> letter, for the axes that have one; `overrides` go before the rule."""
    roles = {}
    for axis in a.layout.grid:
        split = [letter for letter in (a.letter_of(axis), b.letter_of(axis)) if letter]
        if axis in overrides:
            roles[axis] = overrides[axis]
        elif split:  # of two batch letters A's, which comes first
            roles[axis] = min(split, key=lambda letter: _RANK.get(letter, 2))
    return roles


def order(product: str, letter: str, roles: Mapping[str, str], tensors: Sequence[Stored]) -> tuple[str, ...]:
    """The axes that split a letter, major to minor: the order in which the tensors store them.

    Args:
        product: its name, for errors.
        tensors: A, B, and C if its layout is given.

    Raises:
        LayoutError: the tensors disagree; names the layout that would agree.
    """
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
            raise refusals.order(product, operands(tensors), tensor.name, letter, near)
    return (*longest, *(axis for axis in wanted if axis not in longest))


def mirror(a: Stored, c_letters: Letters, roles: Mapping[str, str], orders: Orders) -> Layout:
    """The default layout of C: where A gave up an axis by gathering, C takes the axes of K, as minors."""
    dims = [list(orders[letter]) if letter else [] for letter in c_letters]
    gave = set()
    for axes, letter in zip(a.layout.dims, a.letters, strict=True):
        if any(roles.get(axis) not in a.letters for axis in axes):
            gave.add("n" if letter == "k" else letter)
    target = next((letter for letter in ("m", *c_letters[:-2], "n") if letter in gave), None)
    if target is not None:
        dims[c_letters.index(target)] += orders["k"]
    return Layout(a.layout.grid, *dims)


def operands(tensors: Sequence[Stored]) -> str:
    """`A[M_zy, K_x] . B[K_xz, N_y] on grid z=2 x=2 y=2`"""
    a, b, *_ = tensors
    return f"{a} . {b} on grid {a.layout.grid}"
