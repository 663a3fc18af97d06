"""What design.md calls legal, read a second time and on its own: tests compare `MatMulPlan` with it.

A tensor is a pair (dims, letters): for each dim the axes that split it, major to minor, and the letter of the loop nest
that it is ("m", "n", "k", a batch letter, or None where it has size 1 and is broadcast).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product

Dims = tuple[tuple[str, ...], ...]
Letters = Sequence[str | None]


def all_dims(axes: Sequence[str], ndim: int) -> Iterator[Dims]:
    """Every layout of a tensor: each axis absent or on one dim, and every order inside a dim."""
    for places in product(range(-1, ndim), repeat=len(axes)):
        on = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in range(ndim)]
        yield from product(*(permutations(split) for split in on))


def letters(num_batch: int, ndim: int, last: str, units: Sequence[int] = ()) -> list[str | None]:
    """The letters of an operand with `ndim` dims; `last` is its two last ones, such as "mk"."""
    names = ["batch"] if num_batch == 1 else [f"batch{i}" for i in range(num_batch)]
    batch = names[num_batch - (ndim - 2) :] if ndim > 2 else []
    return [*(None if dim in units else letter for dim, letter in enumerate(batch)), *last]


def place(axis: str, dims: Dims, of: Letters) -> str | None:
    return next((letter for split, letter in zip(dims, of, strict=True) if axis in split), None)


def role(axis: str, a: tuple[Dims, Letters], b: tuple[Dims, Letters]) -> str | None:
    """The table of the design, top to bottom."""
    in_a, in_b = place(axis, *a), place(axis, *b)
    if in_b == "n":
        return "n"
    if in_a == "m":
        return "m"
    for letter in (in_a, in_b):
        if letter is not None and letter.startswith("batch"):
            return letter
    return "k" if "k" in (in_a, in_b) else None


def roles(
    sizes: Mapping[str, int], a: tuple[Dims, Letters], b: tuple[Dims, Letters], overrides: Mapping[str, str]
) -> dict[str, str]:
    found = {axis: overrides.get(axis) or role(axis, a, b) for axis in sizes}
    return {axis: letter for axis, letter in found.items() if letter}


def kept(sizes: Mapping[str, int], of_axis: Mapping[str, str], split: Sequence[str], letter: str | None) -> list[str]:
    """The axes of a dim that stay split during the product.  Axes of one rank split nothing and stand in no order."""
    return [axis for axis in split if sizes[axis] > 1 and letter is not None and of_axis.get(axis) == letter]


def is_legal(sizes: Mapping[str, int], of_axis: Mapping[str, str], tensors: Sequence[tuple[Dims, Letters]]) -> bool:
    """Whether gathered and scattered axes are minor everywhere, and the tensors agree on the order of every letter.

    What a tensor does not store of a letter it slices, as minor axes: so what two tensors keep of a letter must be one
    sequence, or the beginning of it.
    """
    orders: dict[str, list[list[str]]] = {}
    for dims, of in tensors:
        for split, letter in zip(dims, of, strict=True):
            stay = kept(sizes, of_axis, split, letter)
            if [axis for axis in split if sizes[axis] > 1][: len(stay)] != stay:
                return False
            if letter is not None:
                orders.setdefault(letter, []).append(stay)
    return all(
        one[: min(len(one), len(other))] == other[: min(len(one), len(other))]
        for sequences in orders.values()
        for one in sequences
        for other in sequences
    )


def mirror(
    sizes: Mapping[str, int],
    of_axis: Mapping[str, str],
    a: tuple[Dims, Letters],
    b: tuple[Dims, Letters],
    of_c: Letters,
) -> list[list[str]] | None:
    """C's dims where `out` is not given, without axes of one rank; None where the design leaves their order open."""
    order = {}
    for letter in (*of_c, "k"):
        splits = [kept(sizes, of_axis, s, of) for t in (a, b) for s, of in zip(*t, strict=True) if of == letter]
        order[letter] = max(splits, key=len, default=[])
        if len(order[letter]) != sum(sizes[g] > 1 and of_axis.get(g) == letter for g in sizes):
            return None
    gave = {
        letter
        for split, letter in zip(*a, strict=True)
        for axis in split
        if of_axis.get(axis) not in a[1]  # size-1 axes count as named
    }
    target = (
        "m" if "m" in gave else next((letter for letter in of_c[:-2] if letter in gave), "n" if "k" in gave else "")
    )
    return [order[letter] + (order["k"] if letter == target else []) for letter in of_c]


def table(
    sizes: Mapping[str, int], of_axis: Mapping[str, str], stored: tuple[Dims, Letters], to_product: bool
) -> set[tuple[str, str]] | None:
    """The collectives of one tensor by the held -> stored table: {(kind, axis)}; None where an axis changes its dim.

    `to_product`: from its layout to its roles; otherwise from the product's result to its layout.
    """
    moves = set()
    for axis in (axis for axis in sizes if sizes[axis] > 1):
        now, held = place(axis, *stored), of_axis.get(axis)
        split_in_product = held is not None and held in stored[1]
        split_stored = any(axis in split for split in stored[0])
        if split_stored and split_in_product:
            if now != held:
                return None
        elif to_product:
            moves |= {("all_gather", axis)} if split_stored else {("slice", axis)} if split_in_product else set()
        elif held is not None and not split_in_product:
            moves.add(("reduce_scatter" if split_stored else "all_reduce", axis))
        elif split_stored or split_in_product:
            moves.add(("slice" if split_stored else "all_gather", axis))
    return moves
