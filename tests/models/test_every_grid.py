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

BESIDES = [("Olmo2ForCausalLM", "1D"), ("FalconForCausalLM", "2D with dp=2"), ("ElectraForMaskedLM", "3D z=2 x=2")]
# From one grid to the next, an architecture a grid: neighbours in the list, which are alike, are on different ones.
COVER = list(zip(architectures.ALL, itertools.cycle(against_dense.SMALL_GRIDS), strict=False))


@pytest.mark.parametrize("name, grid", COVER + BESIDES, ids=[", ".join(each) for each in COVER + BESIDES])
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


def check_others():
    kept = {}
    for name in other_architectures.SAMPLE:
        layers = {} if name.startswith(("Albert", "GptOss")) else against_dense.ONE_LAYER  # shared; of two kinds
        kept[name] = other_architectures.compare(name, {"x": 1, "y": 2}, "2d", **layers)[1]
    return kept


def test_a_sample_of_others(ranks):
    """Those that name their layers otherwise, or compute something else: right, and what is left whole has a reason."""
    kept = ranks(2).run(check_others)[0]
    assert not kept["BloomForCausalLM"] and not kept["all heads, GPTBigCodeForCausalLM"]
    assert not kept["CodeGenForCausalLM"] and "sinks" in kept["GptOssForCausalLM"]["model.layers.0.self_attn"]
    for name in ("norms a head, StableLmForCausalLM", "shared keys, DebertaV2ForMaskedLM"):
        assert not [layer for layer in kept[name] if layer.endswith(("self_attn", "self", "proj"))], kept[name]
