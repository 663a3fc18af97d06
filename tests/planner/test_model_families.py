"""What is read of architectures' configs, against the models themselves; `real_models.py` has all of the families."""

import pytest

pytest.importorskip("transformers")

from real_models import built, config_of, counts, difference

from ndtp.errors import GridError
from ndtp.planner.model_config import sizes_of
from ndtp.planner.model_families import ENCODER_DECODERS, GATED, PLAIN, WITHOUT_VOCABULARY

# One of a kind each: names of sizes, gates, stacks, heads of keys, widths of embeddings.
FAMILIES = ["llama", "gpt2", "falcon", "t5", "bart", "whisper", "clip_text_model", "deberta", "wav2vec2", "electra"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_sizes_are_those_of_the_model(kind):
    """Every Linear of its layers, its embedding and its head, to the last weight."""
    config = config_of(kind)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"):
        if getattr(config, name, None):  # few layers are built sooner
            setattr(config, name, 2)
    model, saved = built(kind, config)
    assert difference(counts(model), saved) is None


def test_the_table_is_one():
    assert not set(GATED) & set(PLAIN)
    assert set(ENCODER_DECODERS) | set(WITHOUT_VOCABULARY) <= {*GATED, *PLAIN}
    assert {"clip_text_model", "xlm-roberta", "deberta", "wav2vec2", "vit", "bert"} <= set(PLAIN)
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"} <= set(GATED)


@pytest.mark.parametrize("kind", ["swin", "albert", "mamba", "gpt_oss", "switch_transformers"])
def test_what_is_built_otherwise_is_refused_by_name(kind):
    with pytest.raises(GridError, match=rf"model_type='{kind}' is no family|mixture-of-experts|must be an integer"):
        sizes_of(config_of(kind).to_dict())
