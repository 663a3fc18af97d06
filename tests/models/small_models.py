"""Two small models that are split in the two ways: by their layers as they are known, and by what one run shows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IDS = torch.arange(32).view(4, 8)
CLASSES = 67  # which ranks do not divide


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 2, 8).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Nano(nn.Module):
    """As people write a GPT."""

    def __init__(self):
        super().__init__()
        self.embed, self.attn, self.ln = nn.Embedding(CLASSES, 16), Attention(), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, CLASSES, bias=False)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        x = x + self.attn(x)
        x = x + self.down(F.gelu(self.up(self.ln(x))))
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), input_ids.flatten()), logits


NAMES = {"nano": ("up", "embed", "head"), "llama": ("model.layers.0.mlp.up_proj", "model.embed_tokens", "lm_head")}


def build(kind):
    torch.manual_seed(0)
    if kind == "nano":
        return Nano()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=CLASSES, num_hidden_layers=1, **sizes))


def called(model):
    """(loss, logits)"""
    out = model(input_ids=IDS, labels=IDS)
    return out[0], out[1]


def layers(kind, model):
    """A Linear inside, the embedding and the head."""
    return [model.get_submodule(name) for name in NAMES[kind]]
