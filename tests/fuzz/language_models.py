"""The models of `language.Language`: decoders whose attention does what no library expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from language import Language
from torch import Tensor, nn


def _halves(x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        return x
    one, other = x.chunk(2, 1)
    return torch.cat((one - 0.3 * other, other + 0.3 * one), 1)


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "head norm": lambda x: x / (x.square().mean(3, keepdim=True) + 0.1).sqrt(),
    "pairs": lambda x: x + 0.5 * x.roll(1, 1),
    "norm over heads": lambda x: x / (x.square().mean((1, 3), keepdim=True) + 0.1).sqrt(),
    "softmax over heads": lambda x: x * (3 * x).softmax(1),
    "numbers": lambda x: x * torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None, None] / x.shape[1],
    "sequences": lambda x: x - 0.5 * x.mean(0, keepdim=True),
    "halves": _halves,
    "flip": lambda x: x + 0.5 * x.flip(1),
    "cumsum": lambda x: x.cumsum(1) / x.shape[1],
    "tokens": lambda x: x + 0.5 * x.roll(1, 2),
    "sorted": lambda x: x.sort(1).values,
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "strongest": lambda x: x * torch.where(x.square().sum(3, keepdim=True) > 0.1, 1.0, 0.5),
}


class Mix(nn.Module):
    """What is done to [batch, heads, tokens, features], with a parameter of its own where it has one."""

    def __init__(self, kind: str, heads: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "gate":
            self.weight = nn.Parameter(torch.randn(heads))
        elif kind == "talking":
            self.weight = nn.Parameter(torch.eye(heads) + 0.3 * torch.randn(heads, heads))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gate":
            return x * torch.sigmoid(self.weight)[:, None, None]
        if self.kind == "talking":
            return torch.einsum("bhtd,hg->bgtd", x, self.weight)
        return MIXED[self.kind](x)


class Core(nn.Module):
    """Of queries, keys and values of all heads."""

    def __init__(self, kind: str, heads: int, causal: bool) -> None:
        super().__init__()
        self.kind, self.causal = kind, causal
        if kind == "slopes":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))
        elif kind == "talking scores":
            self.weight = nn.Parameter(torch.eye(heads) + 0.2 * torch.randn(heads, heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mask is added to the scores; [batch, 1, queries, keys], or as far as it is not the same."""
        size, length = q.shape[-1], k.shape[2]
        if self.kind == "sdpa" and mask is not None:
            return F.scaled_dot_product_attention(q, k, v, mask)
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and q.shape[2] == length)
        if self.kind == "cosine":
            q, k = F.normalize(q, dim=-1) * size, F.normalize(k, dim=-1)
        if self.kind == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        scores = q @ k.transpose(-1, -2) / size**0.5
        places = torch.arange(length)
        apart = (places[length - q.shape[2] :, None] - places).to(q.dtype)
        if self.kind == "slopes":
            scores = scores - self.slopes[:, None, None].to(q.dtype) * apart.abs()
        elif self.kind == "talking scores":
            scores = torch.einsum("bhqk,hg->bgqk", scores, self.weight)
        if self.kind == "linear":
            scores = scores if mask is None else scores * mask.exp()
            scores = scores.masked_fill(apart < 0, 0.0) if self.causal else scores
            return scores / scores.sum(-1, keepdim=True) @ v
        scores = scores if mask is None else scores + mask
        scores = scores.masked_fill(apart < 0, float("-inf")) if self.causal else scores
        return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, program: Language, layer: int) -> None:
        super().__init__()
        self.kind = program.projections[layer]
        self.heads, self.kv_heads, self.size = program.heads, program.kv_heads, program.head_dim
        if self.kind == "by head":
            self.kv_heads = self.heads
        hidden, biases = program.hidden, program.biases
        q, kv = self.heads * self.size, self.kv_heads * self.size
        if self.kind in ("apart", "products"):
            self.q, self.k, self.v = (
                nn.Linear(hidden, q, biases),
                nn.Linear(hidden, kv, biases),
                nn.Linear(hidden, kv, biases),
            )
        else:
            self.qkv = nn.Linear(hidden, q + 2 * kv, biases)
        self.core, self.mix = (
            Core(program.cores[layer], self.heads, program.causal),
            Mix(program.mixes[layer], self.heads),
        )
        self.out = nn.Linear(q, hidden, biases)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.kind in ("apart", "products"):
            q, k, v = self.q(x), self.k(x), self.v(x)
        elif self.kind == "fused":
            q, k, v = self.qkv(x).split([self.heads * self.size, *[self.kv_heads * self.size] * 2], -1)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, self.size)).unbind(-2)
        q, k, v = ((y if y.dim() == 4 else y.unflatten(-1, (-1, self.size))).transpose(1, 2) for y in (q, k, v))
        if self.kv_heads != self.heads:
            k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        y = self.mix(self.core(q, k, v, mask))
        if self.kind == "products":
            weight = self.out.weight.unflatten(1, (self.heads, self.size))
            y = torch.einsum("bhtd,ohd->bto", y, weight)
            return y if self.out.bias is None else y + self.out.bias
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def _norm(program: Language) -> nn.Module:
    kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
    return kinds[program.norm](program.hidden) if program.norm in kinds else nn.Identity()


class Layer(nn.Module):
    def __init__(self, program: Language, layer: int) -> None:
        super().__init__()
        hidden, inner, self.gated = program.hidden, program.inner, program.gated
        self.norm, self.attention, self.mlp_norm = _norm(program), Attention(program, layer), _norm(program)
        if self.gated:
            self.gate = nn.Linear(hidden, inner, program.biases)
        self.up, self.act, self.down = nn.Linear(hidden, inner, program.biases), nn.SiLU(), nn.Linear(inner, hidden)
        self.drop = nn.Dropout(program.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        h = self.mlp_norm(x)
        h = self.act(self.gate(h)) * self.up(h) if self.gated else self.act(self.up(h))
        return x + self.drop(self.down(h))  # type: ignore[no-any-return]


class Own(nn.Module):
    """A decoder of torch alone."""

    def __init__(self, program: Language) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(program.vocabulary, program.hidden), nn.Embedding(16, program.hidden)
        self.layers = nn.ModuleList(Layer(program, i) for i in range(len(program.mixes)))
        self.norm, self.head = _norm(program), nn.Linear(program.hidden, program.vocabulary, bias=False)
        if program.tied:
            self.head.weight = self.tokens.weight

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        asks: bool = False,
    ) -> Any:
        """Logits or the loss, and what the layers give if it is asked for."""
        h = self.tokens(ids) + self.places(torch.arange(ids.shape[1]) if positions is None else positions)
        scores = None if mask is None else mask[:, None, None]
        hidden = []
        for layer in self.layers:
            h = layer(h, scores)
            hidden.append(h)
        logits = self.head(self.norm(h))
        out = logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (out, *hidden) if asks else out


def _llama(program: Language) -> nn.Module:
    """Of transformers, its attention changed as people change it: a subclass, with the rest of the code as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb

    class DroppedMLP(LlamaMLP):
        def forward(self, x: Any) -> Any:
            return self.drop(super().forward(x))

    class OddAttention(LlamaAttention):
        def forward(
            self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None,
            past_key_values: Any = None, **_: Any,
        ) -> Any:  # fmt: skip
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
            y = self.mix(self.core(q, k, v, attention_mask))
            return self.o_proj(y.transpose(1, 2).reshape(*shape[:-2], -1)), None

    config = LlamaConfig(
        vocab_size=program.vocabulary, hidden_size=program.hidden, intermediate_size=program.inner,
        num_hidden_layers=len(program.mixes), num_attention_heads=program.heads, head_dim=program.head_dim,
        num_key_value_heads=program.kv_heads, attention_bias=program.biases, tie_word_embeddings=program.tied,
        max_position_embeddings=32, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    for i, layer in enumerate(model.model.layers):
        if program.dropout:
            layer.mlp.__class__, layer.mlp.drop = DroppedMLP, nn.Dropout(program.dropout)
        if program.mixes[i] or program.cores[i] != "sdpa":
            attention = layer.self_attn
            attention.__class__ = OddAttention
            attention.core = Core(program.cores[i], program.heads, True)
            attention.mix = Mix(program.mixes[i], program.heads)
    return model  # type: ignore[no-any-return]


def language_model(program: Language, seed: int = 0) -> nn.Module:
    torch.manual_seed(program.seed + seed)
    return made(program)


def made(program: Language) -> nn.Module:
    """Of random weights by torch's generator."""
    return (_llama(program) if program.family == "llama" else Own(program)).double()


# What is called otherwise than in the model by torch alone: inputs, and the first or last words of a layer's name.
NAMES = {
    "own": {},
    "llama": {
        "ids": "input_ids", "mask": "attention_mask", "positions": "position_ids", "asks": "output_hidden_states",
        "tokens": "model.embed_tokens", "layers": "model.layers", "head": "lm_head", "up": "mlp.up_proj",
        "down": "mlp.down_proj", "act": "mlp.act_fn", "drop": "mlp.drop",
    },
}  # fmt: skip


def name_in(family: str, name: str) -> str:
    """The name of an input, a layer or a parameter in a model of a family."""
    return ".".join(NAMES[family].get(word, word) for word in name.split("."))


def call(family: str, model: nn.Module, ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> Any:
    """Logits, or the loss.

    Args:
        inputs: a mask [batch, tokens] that is added to scores, positions, and whether hidden states are asked for.
    """
    asks, mask = inputs.get("asks", False), inputs.get("mask")
    if mask is not None:
        inputs["mask"] = mask = mask.to(next(model.parameters()).dtype)
    if mask is not None and family == "llama":  # which takes a mask of numbers in this form alone
        inputs["mask"] = mask[:, None, None].expand(-1, 1, mask.shape[1], -1)
    out = model(ids, labels=labels, **{name_in(family, name): x for name, x in inputs.items()})
    if family == "llama":
        return out.logits if labels is None else out.loss
    return out[0] if asks else out
