"""A few whole programs at random, equal to dense; `python tests/fuzz` runs as many as one likes."""

from __future__ import annotations

import pytest
from campaign import simpler_ones, stripped
from execute import run_programs
from program import check_legal, draw

CASES = {"": (2, 6), "noise": (4, 3), "updates": (2, 4)}  # (ranks, programs)


@pytest.mark.parametrize("focus", CASES, ids=lambda focus: focus or "all")
def test_programs_equal_dense_whatever_ranks_do_beside_them(ranks, focus):
    """Outputs, gradients and values, and the order in which each rank starts its collectives."""
    num_ranks, count = CASES[focus]
    programs = [stripped(draw(seed, num_ranks, focus), {"compiled"}) for seed in range(count)]
    compared = ranks(num_ranks).run(run_programs, programs, timeout=200)
    assert min(compared[0]) > 0


def test_a_seed_draws_one_program_and_what_shrinks_it_ends():
    program = draw(7, 4)
    assert program == draw(7, 4) != draw(8, 4)
    for _ in range(200):
        simpler = next((p for p in simpler_ones(program) if _is_legal(p)), None)
        if simpler is None:
            break
        program = simpler
    assert len(program.steps) == len(program.units) == 1


def _is_legal(program) -> bool:
    try:
        check_legal(program)
    except (ValueError, IndexError):
        return False
    return True
