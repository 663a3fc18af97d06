"""Where models are cut: parts of many architectures, one behind the other and dense, give the whole model's logits."""

import pytest
import torch
from torch import nn

from ndtp import LayoutError
from ndtp.pipelines.cuts import Arrived, Traveller, anatomy_of, part_of_model

SIZES = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "max_position_embeddings": 16, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "Gemma2": {"sliding_window": 2, "attn_implementation": "eager"},  # scales its embedding, caps its logits
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16},  # positions are learned
    "GPTNeoX": {},
}


def model_of(name, **sizes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS.get(name, {}), **sizes})
    ).eval()


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_the_whole(name):
    model = model_of(name)
    anatomy, ids, hidden = anatomy_of(model), torch.randint(1, 30, (2, 6)), None
    names = []
    for layers in (range(1), range(1, 2), range(2, 3)):
        traveller = Traveller()
        part = part_of_model(model, anatomy, layers, traveller)
        names.append({key for key, _ in part.named_parameters(remove_duplicate=False)})
        traveller.hidden = hidden
        given = ids if layers.start == 0 else torch.ones_like(ids)
        try:
            logits = part(input_ids=given, use_cache=False).logits
        except Arrived:
            hidden = traveller.hidden
    torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits)
    assert set.union(*names) == {key for key, _ in model.named_parameters(remove_duplicate=False)}
    assert sum(map(len, names)) == len(set.union(*names)), "each parameter has one stage"


def test_what_cannot_be_cut():
    model = model_of("GPTNeoX")
    inner = model.gpt_neox
    scale = nn.Linear(16, 16)
    model.scale = scale
    with pytest.raises(LayoutError, match="scale took no part in a run"):
        anatomy_of(model)
    between = inner.layers[1].register_forward_hook(lambda layer, args, output: scale(output))
    with pytest.raises(LayoutError, match="scale runs between layers"):
        anatomy_of(model)
    between.remove()
    inner.layers[2].register_forward_pre_hook(lambda layer, args: (args[0] + 0, *args[1:]))
    with pytest.raises(LayoutError, match=r"layers\.2 takes something else than what the layer before it gave"):
        anatomy_of(model)


def test_a_loss_of_routers_that_is_not_the_common_one(monkeypatch):
    model = model_of("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    assert anatomy_of(model).balance.shape == (2, 4)
    words = r"MixtralForCausalLM adds aux_loss .* not as transformers' .*\n  fix: config.output_router_logits = False"

    def twice(model, args, out):
        if out.loss is not None:
            out.loss = 2 * out.loss

    handle = model.register_forward_hook(twice)
    with pytest.raises(LayoutError, match=words):
        anatomy_of(model)
    handle.remove()
    formula = f"{type(model).__module__}.load_balancing_loss_func"
    monkeypatch.setattr(formula, lambda logits, *_: sum(each.square().mean() for each in logits))
    with pytest.raises(LayoutError, match=words):
        anatomy_of(model)
