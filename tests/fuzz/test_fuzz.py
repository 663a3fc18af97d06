"""Random grids, layouts, shapes and dtypes through real collectives: exact forward and backward, or a LayoutError.

Hypothesis chooses; every rank gets the same batch of products and must answer each of them alike.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from products import Product, check_product
from turns import by_turns

from ndtp import Grid, LayoutError

GRIDS = {
    8: [Grid(z=2, x=2, y=2), Grid(x=2, y=4), Grid(dp=2, x=4), Grid(x=8), Grid(z=1, x=4, y=2)],
    4: [Grid(x=2, y=2), Grid(z=4, x=1), Grid(dp=2, x=2, y=1)],
    6: [Grid(x=2, y=3), Grid(x=6), Grid(z=3, x=1, y=2)],
}


@st.composite
def layouts(draw, grid, num_dims):
    """Any injective partial map from axes to dims, in any order of axes."""
    dims = [[] for _ in range(num_dims)]
    for axis in draw(st.permutations(list(grid))):
        dim = draw(st.integers(-1, num_dims - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return " ".join(f"({' '.join(axes)})" if axes else "None" for axes in dims)


@st.composite
def products(draw, num_ranks):
    grid = draw(st.sampled_from(GRIDS[num_ranks]))
    a_batch, b_batch = (draw(st.integers(0, 1)) for _ in range(2))
    # Mostly sizes that every split divides, so that most cases run.
    unit = num_ranks
    size = st.sampled_from([unit, unit, unit, 2 * unit, 2 * unit, unit - 2, 1, 0])
    m, k, n, batch = (draw(size) for _ in range(4))
    flags = [draw(st.booleans()) for _ in range(2)]
    a_shape = (*(draw(st.sampled_from([batch, batch, 1])) for _ in range(a_batch)), *((k, m) if flags[0] else (m, k)))
    b_shape = (*(draw(st.sampled_from([batch, batch, 1])) for _ in range(b_batch)), *((n, k) if flags[1] else (k, n)))
    options = {
        "transpose_a": flags[0],
        "transpose_b": flags[1],
        "regather": draw(st.sampled_from([(), (), ("a",), ("b",), ("a", "b")])),
    }
    if draw(st.integers(0, 9)) == 0:
        letters = ["m", "n", "k"] + (["batch"] if a_batch or b_batch else [])
        options["roles"] = {draw(st.sampled_from(list(grid))): draw(st.sampled_from(letters))}
    num_dims = max(len(a_shape), len(b_shape))
    return Product(
        grid,
        draw(layouts(grid, len(a_shape))),
        draw(layouts(grid, len(b_shape))),
        a_shape,
        b_shape,
        draw(st.one_of(st.none(), layouts(grid, num_dims))),
        draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        draw(st.booleans()),
        (draw(st.booleans()) or draw(st.booleans()), draw(st.booleans()) or draw(st.booleans())),
        options,
    )


def answer(cases):
    """For each case "exact", or the text of its LayoutError; anything else ends the call."""
    answers = []
    for seed, case in enumerate(cases):
        try:
            check_product(case, seed)
        except LayoutError as error:
            answers.append(str(error))
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}") from error
        else:
            answers.append("exact")
    return answers


@pytest.mark.parametrize(("num_ranks", "examples"), by_turns([(8, 4), (4, 8), (6, 4)], 3))
def test_exact_or_a_layout_error_on_every_rank_alike(ranks, num_ranks, examples):
    num_exact = num_refused = 0

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.lists(products(num_ranks), min_size=25, max_size=25))
    def check(cases):
        nonlocal num_exact, num_refused
        answers = ranks(num_ranks).run(answer, cases, timeout=100)
        for rank, theirs in enumerate(answers):
            assert theirs == answers[0], f"rank {rank} answers otherwise than rank 0"
        num_exact += answers[0].count("exact")
        num_refused += len(cases) - answers[0].count("exact")

    check()
    # Neither branch may take over unseen.
    assert num_exact > examples * 2 and num_refused > examples * 2, (num_exact, num_refused)
