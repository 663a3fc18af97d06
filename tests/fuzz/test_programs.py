"""A few whole programs at random, equal to dense; `python tests/fuzz` runs as many as one likes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from campaign import simpler_ones, stripped
from execute import run_programs
from language import DEEDS, HELD, INPUTS, ODD, Language, draw_language
from language_deeds import DEEDS as DONE
from language_loop import KIND_OF, Wrong
from language_run import run_language
from program import check_legal, draw
from turns import by_turns

CASES = {"": (2, 6), "noise": (4, 3), "updates": (2, 4)}  # (ranks, programs)


@pytest.mark.parametrize("focus", by_turns(CASES, 3), ids=lambda focus: focus or "all")
def test_programs_equal_dense_whatever_ranks_do_beside_them(ranks, focus):
    """Outputs, gradients and values, and the order in which each rank starts its collectives."""
    num_ranks, count = CASES[focus]
    programs = [stripped(draw(seed, num_ranks, focus), {"compiled"}) for seed in range(count)]
    compared = ranks(num_ranks).run(run_programs, programs, timeout=200)
    assert min(compared[0]) > 0


def languages():
    """By seeds, of which 23 has a batch of one; q, k, v of one layer; and an odd rank that is none, which is found."""
    pytest.importorskip("transformers")
    scattered = Language(0, 2, scheme="2d-features", grid=(("y", 2),), projections=("fused",), deeds=("eval",))
    compared = run_programs([*(draw_language(seed, 2) for seed in (5, 9, 23)), scattered])
    plain = Language(
        0, 2, grid=(("x", 2),), hidden=8, inner=8, vocabulary=16, batch=1, deeds=(), odd="learning rate", rank=1
    )
    compared.append(run_language(plain))
    # Kinds that change layers, what a model is given, or what all ranks run, on models whose layers have other names.
    for family, kind in (("llama", "dropout's seed"), ("own", "order of layers"), ("llama", "noise in an input"),
                         ("llama", "order of reads")):  # fmt: skip
        compared.append(run_language(replace(plain, family=family, odd=kind)))
    odd, KIND_OF["learning rate"] = KIND_OF["learning rate"], replace(KIND_OF["learning rate"], changes={})
    try:
        run_language(plain)
    except Wrong as error:
        return compared, str(error)
    finally:
        KIND_OF["learning rate"] = odd
    return compared, ""


def test_languages_equal_dense_and_odd_ranks_are_named(ranks):
    compared, error = ranks(2).run(languages, timeout=200)[0]
    assert min(compared) > 0
    assert "learning rate on rank 1 is not named on all" in error


def test_what_is_drawn_can_be_done():
    programs = [draw_language(seed, 4) for seed in range(2000)]
    assert set(DONE) == set(DEEDS) == {deed for program in programs for deed in program.deeds}
    assert set(HELD) == {held for program in programs for held in program.held}
    assert set(INPUTS) == {name for program in programs for name in program.inputs}
    assert set(ODD) == {program.odd for program in programs} - {""}
    assert all(simpler != program for program in programs[:20] for simpler in program.simpler())


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
