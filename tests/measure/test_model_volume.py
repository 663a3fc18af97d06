"""Bytes of a whole model by its config alone: what its report says, and what real ranks receive."""

import pytest
import torch
from turns import by_turns

pytest.importorskip("transformers")

import ndtp
from ndtp import Grid
from ndtp.measure.model_volume import GridCandidate, ModelVolume, candidates, family_of
from ndtp.measure.volume import fake_group
from ndtp.models.counted import built, count_config
from ndtp.planner.hardware import Hardware
from ndtp.planner.request import Request
from ndtp.planner.search import search

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "num_hidden_layers": 5, **SMALL}
EXPERTS = {
    "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, "num_hidden_layers": 8, "num_key_value_heads": 2,
    **SMALL,
}  # fmt: skip
T5 = {
    "model_type": "t5", "decoder_start_token_id": 0, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4,
    "vocab_size": 64, "num_layers": 4, "num_decoder_layers": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 4, "relative_attention_max_distance": 6,  # a trial goes beyond these
}  # fmt: skip


def request(config, ranks, tokens, **fixed):
    return Request(count_config(config).blocks(tokens), ranks, Hardware.load("h100-ib"), dtype="float32", fixed=fixed)


@pytest.mark.parametrize(("config", "period"), by_turns([(LLAMA, 1), (EXPERTS, 2), (T5, 1)], 3))
def test_few_layers_tell_of_all(config, period):
    """Entry by entry what all layers move, also where layers of two kinds take turns and where there are two stacks."""
    chosen = next(c for c in candidates(request(config, 8, 256), 1) if family_of(c.plan) == "3D")
    with fake_group(8):
        volume_of = ModelVolume(config, "config", torch.float32, 16)
        few, more, times = volume_of.repeat
        name = "num_layers" if config is T5 else "num_hidden_layers"
        assert more[name] - few[name] == period and few[name] + times * period == config[name] and times > 1
        volume = volume_of.on(chosen, 16)
        volume_of.repeat = None
        assert volume == volume_of.on(chosen, 16)


def test_layers_that_differ_are_run_all():
    """Three dense layers, then experts in all others: no layer of the few is like the last."""
    volume_of = ModelVolume(
        {**EXPERTS, "mlp_only_layers": [0, 3, 4, 7], "decoder_sparse_step": 1}, "config", torch.float32, 16
    )
    assert volume_of.repeat is None


def metered(config, grid):
    torch.manual_seed(0)
    model = built(config)
    model = type(model)(model.config)
    ids = torch.randint(64, (4 // grid["dp"], 16))
    model = ndtp.parallelize(model, ndtp.ProcessGrid(grid), scheme="2d")
    with ndtp.CommMeter() as meter:
        model(input_ids=ids, labels=ids).loss.backward()
    return meter.volume


def test_bytes_are_those_of_real_ranks(ranks):
    grid = Grid(dp=2, x=1, y=2)
    config = LLAMA
    plan = next(p for p in search(request(config, 4, 64, dp=2)) if p.grid["y"] == 2)
    with fake_group(4):
        volume = ModelVolume(config, "config", torch.float32, 16).on(GridCandidate(plan, "2d"), 4)
    assert ranks(4).run(metered, config, grid) == [volume] * 4
