"""A cover of `every_grid.py`: each architecture on one grid, each grid with one architecture at least."""

import itertools
import math

import pytest

pytest.importorskip("transformers")

import against_dense
import architectures
import other_architectures
import torch
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from turns import by_turns

BESIDES = [("Olmo2ForCausalLM", "1D"), ("FalconForCausalLM", "2D with dp=2"), ("ElectraForMaskedLM", "3D z=2 x=2")]
# From one grid to the next, an architecture a grid: neighbours in the list, which are alike, are on different ones.
COVER = list(zip(architectures.ALL, itertools.cycle(against_dense.SMALL_GRIDS), strict=False))
OF_TURN = by_turns(COVER + BESIDES, 3)


@pytest.mark.parametrize("name, grid", OF_TURN, ids=[", ".join(each) for each in OF_TURN])
def test_equals_dense(ranks, tmp_path, name, grid):
    """Logits, loss and all gradients within a multiple of the error of dense, repeats to the bit, the same tokens."""
    path = tmp_path / "dense"
    torch.save(against_dense.reference(name, small=True), path)
    sizes, _ = against_dense.SMALL_GRIDS[grid]
    rows = ranks(math.prod(sizes.values())).run(against_dense.compare_from, str(path), name, grid, small=True)
    for row in rows:
        assert not row["failed"], f"{name}, {grid}: {row['failed']}"
        assert row["bytes"]["measured"] == rows[0]["bytes"]["predicted"], row["bytes"]
        if (name, grid) in BESIDES:
            assert row["split"] > 0.97 and not row["gathered"], row


def test_the_cover_has_all():
    assert {name for name, _ in COVER} == set(architectures.ALL)
    assert {grid for _, grid in COVER} == set(against_dense.SMALL_GRIDS)


def check_other(name):
    layers = {} if name.startswith(("Albert", "GptOss")) else against_dense.ONE_LAYER  # shared; of two kinds
    return other_architectures.compare(name, {"x": 1, "y": 2}, "2d", **layers)[1]


@pytest.mark.parametrize("name", by_turns(other_architectures.SAMPLE, 3))
def test_a_sample_of_others(ranks, name):
    """Those that name their layers otherwise, or compute something else: right, and what is left whole has a reason."""
    kept = ranks(2).run(check_other, name)[0]
    if name in ("BloomForCausalLM", "all heads, GPTBigCodeForCausalLM", "CodeGenForCausalLM"):
        assert not kept
    elif name == "GptOssForCausalLM":
        assert "sinks" in kept["model.layers.0.self_attn"]
    elif name in ("norms a head, StableLmForCausalLM", "shared keys, DebertaV2ForMaskedLM"):
        assert not [layer for layer in kept if layer.endswith(("self_attn", "self", "proj"))], kept
