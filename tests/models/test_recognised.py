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
