"""A plan meets the shapes of its operands.  Pure."""

from __future__ import annotations

from dataclasses import replace

from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.roles import letters_of
from ndtp.algebra.stored import shown
from ndtp.errors import LayoutError


def bind(plan: MatMulPlan, a_shard: tuple[int, ...], b_shard: tuple[int, ...]) -> tuple[MatMulPlan, dict[str, int]]:
    """The plan with broadcast batch dims marked, and the global size of every letter.

    Raises:
        LayoutError: shapes that do not fit each other or the layouts.
    """
    where = f"MatMul '{plan.name}'"
    for tensor, layout, shard in (("A", plan.a, a_shard), ("B", plan.b, b_shard)):
        if len(shard) != layout.ndim:
            raise LayoutError(
                f"{where}: the shard of {tensor} has shape {shard}, its layout {layout} {layout.ndim} dims"
            )
    a_shape, b_shape = (
        tuple(size * layout.num_splits(dim) for dim, size in enumerate(shard))
        for layout, shard in ((plan.a, a_shard), (plan.b, b_shard))
    )
    batch = plan.batch_letters  # a bound plan may meet operands that broadcast otherwise: no dim counts as one yet
    operands = plan.stored["A"], plan.stored["B"]
    a_letters, b_letters = (letters_of(batch, each.layout.ndim, (), each.letters[-2:]) for each in operands)
    sizes: dict[str, int] = {}
    for letter in plan.letters:
        found = {
            tensor: shape[letters.index(letter)]
            for tensor, shape, letters in (("A", a_shape, a_letters), ("B", b_shape, b_letters))
            if letter in letters
        }
        sizes[letter] = max(found.values()) if 0 not in found.values() else 0
        may_differ = letter in batch
        if any(size != sizes[letter] and not (may_differ and size == 1) for size in found.values()):
            raise LayoutError(
                f"{where}: {shown(letter)} is {found['A']} in A {a_shape} and {found['B']} in B {b_shape}\n"
                f"  {plan.operands}; shards are {a_shard} and {b_shard}\n"
                f"  fix: pass this rank's shards, with global shapes that torch.matmul would take"
            )
    a_units, b_units = (
        tuple(
            dim
            for dim, (letter, size) in enumerate(zip(letters, shape, strict=True))
            if letter in batch and size == 1 and sizes[letter] != 1
        )
        for shape, letters in ((a_shape, a_letters), (b_shape, b_letters))
    )
    # `out` and the roles stay as announced.
    same = (a_units, b_units) == (plan.a_units, plan.b_units)
    bound = plan if same else replace(plan, a_units=a_units, b_units=b_units)
    bound.check_divides(sizes)
    return bound, sizes
