"""Decode steps: what a layer found out in the first one holds while its parameters do."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from architectures import build
from products import mesh_of

import ndtp
from ndtp import Grid
from ndtp.models.settled import MOST_SETTLED

HERE = str(Path(ndtp.__file__).parent)


def calls_of(run):
    """How many functions of ndtp are called."""
    count = 0

    def look(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(HERE)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.cpu
@torch.no_grad()
def test_a_decode_step_repeats_itself():
    """Layers decide once what they do with rows of a shape, until another parameter is put in one's place."""
    dense, model = build("LlamaForCausalLM"), build("LlamaForCausalLM")
    ndtp.parallelize(model, mesh_of(Grid(x=1)), scheme="1d")
    ids = torch.arange(8).view(2, 4)
    model(input_ids=ids), model(input_ids=ids)
    assert calls_of(lambda: model(input_ids=ids)) <= 1100

    for each in (dense, model):
        layer = each.model.layers[0]
        for part in (layer.mlp.up_proj, layer.self_attn.v_proj, each.model.norm):
            part.weight = torch.nn.Parameter(1.5 * torch.ones_like(part.weight))
    torch.testing.assert_close(model(input_ids=ids).logits, dense(input_ids=ids).logits)
    for each in (dense, model):
        torch.nn.utils.parametrizations.weight_norm(each.model.layers[1].mlp.down_proj)
        each.model.layers[1].mlp.down_proj.parametrizations.weight.original0.mul_(3)
    torch.testing.assert_close(model(input_ids=ids).logits, dense(input_ids=ids).logits)
    for each in (dense, model):
        layer = each.model.layers[0].mlp.gate_proj
        del layer._parameters["bias"]
        layer.bias = torch.linspace(0, 1, 48).double()
    torch.testing.assert_close(model(input_ids=ids).logits, dense(input_ids=ids).logits)
    for each in (dense, model):
        each.model.norm.variance_epsilon = 0.5
    torch.testing.assert_close(model(input_ids=ids).logits, dense(input_ids=ids).logits)
    kept = model.model.norm.settled
    for key in range(MOST_SETTLED + 8):
        kept.add(key, next(iter(kept.values())))
    assert 0 < len(kept) <= MOST_SETTLED and not copy.deepcopy(kept)


@torch.no_grad()
def test_a_norm_of_all_heads_has_the_epsilon_that_its_module_has():
    dense, model = build("Olmo2ForCausalLM", num_hidden_layers=1), build("Olmo2ForCausalLM", num_hidden_layers=1)
    ndtp.parallelize(model, mesh_of(Grid(x=1)), scheme="1d")
    ids = torch.arange(8).view(2, 4)
    for each in (dense, model):
        each.model.layers[0].self_attn.k_norm.variance_epsilon = 0.5
    torch.testing.assert_close(model(input_ids=ids).logits, dense(input_ids=ids).logits)


@torch.no_grad()
def check_a_layer_whose_result_is_whole():
    dense, model = build("BertForSequenceClassification"), build("BertForSequenceClassification")
    ndtp.parallelize(model, mesh_of(Grid(x=2)), scheme="1d-sp")
    ids = torch.arange(8).view(2, 4)
    torch.testing.assert_close(model.eval()(input_ids=ids).logits * 1.0, dense.eval()(input_ids=ids).logits)


def test_a_layer_whose_result_is_split_less_than_its_weight(ranks):
    """The pooler of Bert, whose few rows every rank has whole."""
    ranks(2).run(check_a_layer_whose_result_is_whole)
