"""Which way a stock model is split: by its layers where these are known, by what one run of it shows where not."""

import pytest

import ndtp
from ndtp import Grid
from ndtp.measure.volume import fake_group
from ndtp.models.any_model import AnyModel

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("name", "sizes", "is_observed"),
    [("Llama", TINY | HEADS, False), ("Mamba", TINY, True), ("DiffLlama", TINY | HEADS, True)],
)
def test_nearly_all_is_split_in_either_way(name, sizes, is_observed):
    config = getattr(transformers, f"{name}Config")(**sizes)
    with fake_group(4):
        mesh = ndtp.ProcessGrid(Grid(x=2, y=2), device_type="cpu")
        model = ndtp.parallelize(getattr(transformers, f"{name}ForCausalLM")(config), mesh, scheme="2d")
    total, split, _ = model.ndtp_report.parameters
    assert split / total > 0.95, str(model.ndtp_report)
    assert isinstance(model.ndtp_report.split, AnyModel) == is_observed


def test_settings_of_a_table_that_a_split_one_does_not_have():
    """It stays whole, and is refused where each look-up would change the weight of the head."""
    config = transformers.LlamaConfig(**TINY, **HEADS)
    with fake_group(2):
        mesh = ndtp.ProcessGrid(Grid(x=2), device_type="cpu")
        model, tied = (transformers.LlamaForCausalLM(config) for _ in range(2))
        model.model.embed_tokens.scale_grad_by_freq, tied.model.embed_tokens.max_norm = True, 1.0
        tied.lm_head.weight = tied.model.embed_tokens.weight
        kept = ndtp.parallelize(model, mesh, scheme="1d").ndtp_report.kept
        with pytest.raises(ndtp.LayoutError, match="a weight that it shares with another layer"):
            ndtp.parallelize(tied, mesh, scheme="1d")
    assert kept["model.embed_tokens"] == "it has scale_grad_by_freq=True"


def test_a_model_without_a_hidden_size_on_replicas_alone():
    """Segformer, of which each stage has another."""
    sizes = {"num_encoder_blocks": 1, "depths": [1], "sr_ratios": [1], "hidden_sizes": [16], "patch_sizes": [3]}
    config = transformers.SegformerConfig(
        **sizes, strides=[2], num_attention_heads=[2], mlp_ratios=[2], decoder_hidden_size=16
    )
    with fake_group(2):
        mesh = ndtp.ProcessGrid(Grid(dp=2), device_type="cpu")
        model = ndtp.parallelize(transformers.SegformerForSemanticSegmentation(config), mesh, scheme="1d")
    assert isinstance(model.ndtp_report.split, AnyModel)
