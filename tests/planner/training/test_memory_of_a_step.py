"""Memory of a step: counted on real ranks, and what must hold of any."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from turns import by_turns

import ndtp.testing
from ndtp.planner.training.memory import memory
from ndtp.planner.training.practice import PRACTICES, Practice
from ndtp.planner.training.splits import Splits
from ndtp.planner.training.transformer import Transformer

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

MODEL = Transformer(8, 1024, 4096, 16, 32000, 2048, gated=True)


@pytest.mark.parametrize("name", by_turns(["3d z=2 y=2", "3d z=4"], 2))
def test_bytes_are_those_that_ranks_hold(name):
    """`bench/planner_memory.py` has more grids and sizes."""
    pytest.importorskip("transformers")
    import planner_memory as bench

    sizes = bench.SIZES[0]
    ratio = bench.compared(name, sizes, ndtp.testing.run(bench.counted, 4, args=(name, sizes)))
    ratio = ratio["predicted_over_counted"]
    assert ratio["weights"] == ratio["gradients"] == ratio["optimizer"] == pytest.approx(1, abs=1e-3)
    assert ratio["activations"] == pytest.approx(1, abs=0.01)
    assert ratio["total"] == pytest.approx(1, abs=0.05)


def of(practice=PRACTICES["megatron"], batch=64, **splits):
    return memory(MODEL, batch, practice, Splits(**splits))


def test_what_makes_less():
    plain = of(micro=1)
    assert float(of(replace(PRACTICES["megatron"], recompute="layer")).activations) < 0.3 * float(plain.activations)
    half = replace(PRACTICES["megatron"], recompute="layers")
    assert 0.4 * float(plain.activations) < float(of(half).activations) < 0.7 * float(plain.activations)
    assert float(of(y=4).activations) == pytest.approx(float(plain.activations) / 4, rel=0.01)
    assert float(of(dp=4).optimizer) == pytest.approx(float(plain.optimizer) / 4)
    unsharded = replace(PRACTICES["megatron"], shard_optimizer=False)
    assert float(of(unsharded, dp=4).optimizer) == float(of(unsharded).optimizer)
    assert float(of(z=4).weights) == pytest.approx(float(plain.weights) / 4, rel=1e-3)


def test_state_by_hand():
    """Two bytes of a weight, four of its gradient, twelve of AdamW."""
    told = of()
    assert float(told.gradients) == 2 * float(told.weights)
    assert float(told.optimizer) == 6 * float(told.weights)
    norms = (2 * MODEL.layers + 1) * MODEL.hidden
    assert float(told.weights) == 2 * (MODEL.parameters + norms)


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    one, four = of(pp=4, batch=4, micro=4), of(pp=4, batch=64, micro=4)
    layers = float(four.activations) / float(one.activations)
    assert 3.5 < layers < 4.5


def test_written_scores_count_and_selective_recomputation_drops_them():
    core = Practice(attention="core")
    written, dropped = of(core), of(replace(core, recompute="selective"))
    scores = MODEL.layers * 2048 * 2048 * MODEL.heads * 2
    assert float(written.activations - dropped.activations) == pytest.approx(scores, rel=0.01)
