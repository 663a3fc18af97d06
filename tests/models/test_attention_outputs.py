"""Attention weights that a recognised model hands out: split over heads and sequences, with the sizes of the whole."""

from __future__ import annotations

import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, attn_implementation="eager", **sizes)
    return LlamaForCausalLM(config).eval()


def check_weights():
    ids = torch.arange(32).view(4, 8)
    expected = llama()(input_ids=ids, output_attentions=True).attentions[0]
    model = ndtp.parallelize(llama(), mesh_of(Grid(y=2, x=2)), scheme="2d")  # in a planner's order: y is the slower one
    weights = model(input_ids=ids, output_attentions=True).attentions[0]
    assert weights.shape == expected.shape and weights.spec.dims == (("x",), ("y",), (), ())
    torch.testing.assert_close(weights.gathered(), expected)
    torch.testing.assert_close(weights.mean(1).gathered(), expected.mean(1))  # over heads of all ranks


def test_weights_have_the_sizes_of_the_whole(ranks):
    ranks(4).run(check_weights)


class Shifted(nn.Module):
    """Rotary tables with a learned part: an argument of attention that all heads share, and that has a gradient."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, tables):
        return tables + self.shift


def check_argument_with_gradient():
    ids = torch.arange(32).view(4, 8)
    dense, model = llama(), llama()
    for each in (dense, model):
        layer = each.model.layers[0]
        layer.shifted = Shifted()
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given, layer=layer: (
                args,
                given | {"position_embeddings": tuple(map(layer.shifted, given["position_embeddings"]))},
            ),
            with_kwargs=True,
        )
    ndtp.parallelize(model, mesh_of(Grid(x=2, y=2)), scheme="2d")
    assert type(model.ndtp_report.split).__name__ == "Split"
    for each in (dense, model):
        each(input_ids=ids, labels=ids).loss.backward()
    mine, expected = (each.model.layers[0].shifted.shift.grad for each in (model, dense))
    torch.testing.assert_close(mine.full_tensor(), expected)


def test_gradient_of_an_argument_that_all_heads_share(ranks):
    ranks(4).run(check_argument_with_gradient)
