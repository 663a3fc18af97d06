"""Attention weights that a recognised model hands out: split over heads and sequences, with the sizes of the whole."""

from __future__ import annotations

import torch
from products import mesh_of

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
    model = ndtp.parallelize(llama(), mesh_of(Grid(x=2, y=2)), scheme="2d")
    weights = model(input_ids=ids, output_attentions=True).attentions[0]
    assert weights.shape == expected.shape and weights.spec.dims == (("x",), ("y",), (), ())
    torch.testing.assert_close(weights.gathered(), expected)
    torch.testing.assert_close(weights.mean(1).gathered(), expected.mean(1))  # over heads of all ranks


def test_weights_have_the_sizes_of_the_whole(ranks):
    ranks(4).run(check_weights)
