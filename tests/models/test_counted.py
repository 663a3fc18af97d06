"""What is counted in a model that transformers builds without memory, against the model's own parameters."""

import pytest

pytest.importorskip("transformers")

from ndtp.errors import GridError
from ndtp.models.counted import built, count_config
from ndtp.planner.block_cost import Block

SMALL = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 20, **SMALL}
T5 = {"model_type": "t5", "d_model": 48, "d_kv": 20, "d_ff": 80, "num_heads": 3, "vocab_size": 61, "num_layers": 2,
      "num_decoder_layers": 5, "feed_forward_proj": "gated-gelu"}  # fmt: skip


def blocks(config):
    return {block.name: block for block in count_config(config).blocks(7)}


def test_blocks_have_the_sizes_of_the_model():
    found = blocks(LLAMA | {"tie_word_embeddings": True})
    assert found["attention"] == Block(7, 48, (80, 40, 40), 80, (4,), 2, 80, "attention", times=3)
    assert found["gated mlp"].outs == (80, 80) and found["vocabulary"].tied
    found = blocks(T5)
    assert (found["attention"].times, found["gated mlp"].times) == (7, 7)
    assert found["cross attention"].times == found["cross keys"].times == 5 and found["cross keys"].outs == (60, 60)


@pytest.mark.parametrize(
    ("config", "head"),
    [({}, True), ({"architectures": ["LlamaModel"]}, False), ({"architectures": ["Other", "LlamaForCausalLM"]}, True)],
)
def test_the_class_that_is_named_is_built(config, head):
    assert bool(blocks(LLAMA | config)["vocabulary"].outs) == head


def test_every_parameter_is_counted_once():
    """What is no weight of a block is named, alike ones of all layers as one."""
    vision = {"hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    for config in (
        LLAMA,
        T5,
        {"model_type": "qwen2_moe", "num_experts": 4, "mlp_only_layers": [1], **SMALL},
        {"model_type": "llava", "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model", **vision}},
    ):
        model, counted = built(config), count_config(config)
        assert counted.parameters == sum(p.numel() for p in model.parameters())
        assert counted.planned == sum(block.times * block.parameters for block in counted.blocks(1))
        assert counted.planned + sum(size for _, size in counted.beside) == counted.parameters
    assert ("model.multi_modal_projector.linear_2", 48**2) in counted.beside
    assert ("model.vision_tower.encoder.layers.*.mlp.fc1", 2 * 36 * 40) in counted.beside


def test_few_weights_on_other_rows_lie_beside():
    """A head that pools is no layer; hidden states of images are planned in a model of images."""
    small = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    counted = count_config({"model_type": "siglip_vision_model", **small, "num_hidden_layers": 8, "image_size": 32})
    assert [(block.name, block.times) for block in counted.blocks(1)] == [("attention", 8), ("mlp", 8)]
    assert ("head.mlp.fc1", 48 * 80) in counted.beside


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "albert", **SMALL, "embedding_size": 16}, "query' runs 3 times in a step: its layers share"),
        ({"model_type": "funnel", "d_model": 48, "n_head": 3, "d_head": 16, "block_sizes": [1, 1]}, "rows, others 32"),
        (LLAMA | {"model_type": "gpt_oss"}, "of its parameters; what stays whole: model.layers.*.mlp.experts.gate_up"),
        ({"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 2}, "its layers are of another kind"),
        ({"model_type": "resnet"}, "the model's config tells no size of its hidden states"),
        (LLAMA | {"architectures": ["GoneForCausalLM"]}, "has no such model\n  fix: leave architectures out"),
        (LLAMA | {"architectures": ["T5Model"]}, "T5Model: it takes a T5Config, not a LlamaConfig"),
        (LLAMA | {"hidden_size": "big"}, "transformers takes no such config of 'llama'"),
        (LLAMA | {"num_hidden_layers": 10**6}, "layers are counted up to 4096"),
    ],
)  # fmt: skip
def test_what_is_not_planned_says_why(config, message):
    with pytest.raises(GridError) as refusal:
        count_config(config)
    assert message in str(refusal.value)
