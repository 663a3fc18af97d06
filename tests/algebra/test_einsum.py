"""Random einsums on random layouts against torch's, forward and backward, exact; and none refused that is legal."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod
from random import Random

import legal
import pytest
from einsum_cases import Case, random_case

from ndtp import Grid, Layout, LayoutError, MatMulPlan
from ndtp.algebra.einsum import EinsumPlan, parse
from ndtp.algebra.einsum_products import product_form


def sweep(cases):
    verdicts = Counter(case.check() for case in cases)
    assert verdicts[True] and sum(verdicts.values()) == len(cases)
    return verdicts


@pytest.mark.parametrize(
    "expression",
    [
        "m k, k n -> m n",
        "m s, n -> m n",
        "b k, b k -> b",
        "m k, m -> m",
        "m k, k -> ",
        "m, n -> n m",
        "m k, m k -> k m",
    ],
)
def test_all_layouts_of_two_axes(expression):
    grid = Grid(x=2, y=2)
    operands, _ = parse(expression)
    sweep([Case(grid, expression, dims) for dims in product(*(legal.all_dims("xy", len(own)) for own in operands))])


@pytest.mark.parametrize("expression", ["m k -> m", "m k -> k m", "m k -> "])
def test_all_layouts_and_results_of_one_operand(expression):
    grid = Grid(x=2, y=3)
    (own,), result = parse(expression)
    layouts = product(legal.all_dims("xy", len(own)), [None, *legal.all_dims("xy", len(result))])
    sweep([Case(grid, expression, [dims], out) for dims, out in layouts])


def test_random_einsums_are_exact_or_refused_with_a_fix():
    verdicts = Counter(random_case(Random(seed)).check() for seed in range(2000))
    assert min(verdicts[True], verdicts[False]) > 100


def test_a_product_of_matrices_is_one():
    """Roles, output and every byte are those of `MatMulPlan`, batch dims included."""
    grid = Grid(z=2, x=2, y=2)
    a = list(legal.all_dims("zxy", 2))[::3]
    same = 0
    for one, other in product(a, a):
        try:
            plan = MatMulPlan(Layout(grid, *one), Layout(grid, *other))
        except LayoutError:
            with pytest.raises(LayoutError):
                EinsumPlan("m k, k n -> m n", [Layout(grid, *one), Layout(grid, *other)], [(8, 16), (16, 24)])
            continue
        found = EinsumPlan("m k, k n -> m n", [plan.a, plan.b], [(8, 16), (16, 24)])
        assert (found.out, found.roles, found.volume()) == (plan.out, plan.roles, plan.volume((8, 16, 24)))
        same += 1
    assert same > 50
    batched = MatMulPlan(Layout(grid, "z", "x", None), Layout(grid, "z", None, "y"))
    found = EinsumPlan("e m k, e k n -> e m n", [batched.a, batched.b], [(2, 8, 8), (2, 8, 8)])
    assert (found.out, found.volume()) == (batched.out, batched.volume((2, 8, 8, 8)))


def test_products_in_other_words_move_the_same():
    """What runs as a product of matrices sends what the einsum would, to the byte."""
    found = Counter()
    for seed in range(600):
        case = random_case(Random(seed))
        if not case.legal or len(case.names) != 2:
            continue
        plan = case.plan()
        form = product_form(plan)
        found[form is not None] += 1
        if form is not None:
            *batch, m, n = (prod(plan.sizes[letter] for letter in group) for group in form.c)
            k = prod(plan.sizes[letter] for letter, of in plan.classes.items() if of == "k")
            assert form.plan.volume((*batch, m, k, n)) == plan.volume(), f"{plan} as {form.plan}"
    assert min(found.values()) > 50
    heads = EinsumPlan("b s h d, h d e -> b s e", [Layout(GRID, "z", None, "y", None), Layout(GRID, "y", None, "x")],
                       [(2, 4, 2, 4), (2, 4, 8)])  # fmt: skip
    assert str(product_form(heads).plan) == "A[M_z, K_y] . B[K_y, N_x] -> C[M_z, N_x]: AR C over y"


GRID = Grid(z=2, x=2, y=2)


def of(expression, *layouts, shapes, **options):
    return lambda: EinsumPlan(expression, [Layout.parse(GRID, text) for text in layouts], shapes, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: parse("m k, k n"), "'->' alone gives a number"),
        (lambda: parse("m m -> m"), "m is named twice in 'm m'"),
        (lambda: parse("m -> m n"), "n comes out, and no operand has it; they have m"),
        (lambda: parse("m-k -> m"), "'m-k' is no name of a dim"),
        (of("m k, k n -> m n", "x None", shapes=[(4, 4)]), "it names 2 operands, and there are 1"),
        (of("m k -> m", "x", shapes=[(4,)]), r"A is 'm k' there, has 1 dims and the layout 'x'"),
        (of("m k, k n -> m n", "x None", "None y", shapes=[(4, 6), (8, 4)]), "k is 6 in A and 8 in B"),
        (of("m k -> m", "x None", shapes=[(4, 4)], roles={"q": "m"}), "one of the letters m, k"),
        (
            of("tokens k, k n -> tokens n", "(z x) None", "None y", shapes=[(6, 4), (4, 4)]),
            r"Einsum 'tokens k, k n -> tokens n': dim tokens of A \(6\) is split over axis z \(2\), x \(2\), and 4 "
            r"does not divide 6.\n  A\[tokens_zx, k\] . B\[k, n_y\] on grid z=2 x=2 y=2; A is \(6, 4\)\n"
            r"  fix: the product of z x in \{1, 2, 3, 6\}, or pad tokens to 8$",
        ),
        (
            of("m k, k n -> m n", "None (z x)", "(x z) None", shapes=[(4, 4), (4, 4)]),
            r"B and the other tensors disagree on the order of the axes of k\n.*\n  fix: B as \{'k': \('z', 'x'\)\}$",
        ),
        (
            of("m k, k n -> m n", "(y x) None", "None y", shapes=[(4, 4), (4, 4)]),
            r"A stores dim m over \(y x\), of which \(x\) must stay .*\n  .*\n  fix: A as \{'m': \('x', 'y'\)\}$",
        ),
    ],
)
def test_refusals_name_what_to_do(make, words):
    with pytest.raises(LayoutError, match=words):
        make()


def test_pure_and_large():
    """Of a million ranks, as quickly."""
    grid = Grid(z=100, x=100, y=100)
    plan = EinsumPlan(
        "b s h, h n d -> b s n d",
        [Layout(grid, ("z", "y"), None, "x"), Layout(grid, ("x", "z"), "y", None)],
        [(10**6, 64, 10**4), (10**4, 10**4, 128)],
    )
    assert str(plan) == "A[b_zy, s, h_x] . B[h_xz, n_y, d] -> C[b_zx, s, n_y, d]: AG A over y, AG B over z, RS C over x"
    assert plan.volume().total > 0 and prod(plan.shape) == 10**6 * 64 * 10**4 * 128
