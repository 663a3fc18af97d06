"""Models that follow no pattern of transformers, in the forms in which people write them: each with its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, WORDS, LONGEST = 32, 4, 64, 16


class FusedAttention(nn.Module):
    """Causal attention with q, k and v in one, as minimal GPTs have it."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))
        self.flash = flash

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            y = F.softmax(scores.masked_fill(self.seen[:, :, :t, :t] == 0, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Block(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = Norm(), FusedAttention(flash), Norm()
        self.c_fc, self.c_proj = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class MinimalGPT(nn.Module):
    """Head and table share a weight; the loss is taken in the model."""

    def __init__(self, flash: bool = True, tied: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LONGEST, HIDDEN)
        self.h, self.ln_f = nn.ModuleList(Block(flash) for _ in range(2)), Norm()
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        x = self.wte(input=ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits[:, [-1], :]
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class EinsumAttention(nn.Module):
    """Attention of separate projections by einsum and softmax, batch or sequence first alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.to_q, self.to_kv, self.out = (
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, 2 * HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, (k, v) = self.to_q(y), self.to_kv(y).chunk(2, dim=-1)
        q, k, v = (z.unflatten(-1, (HEADS, -1)) for z in (q, k, v))
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5).softmax(-1)
        return x + self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class EinsumModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(16, HIDDEN), nn.Linear(HIDDEN, 16)
        self.blocks = nn.Sequential(EinsumAttention(), EinsumAttention())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inp(x)).mean(1))


class ImageBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.qkv, self.proj = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.n2, self.fc1, self.fc2 = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.ones(HIDDEN) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * (c // HEADS) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, n, c)) * self.scale
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


class ImageTransformer(nn.Module):
    """Patches by a convolution, a class token, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size = 16
        self.patch = nn.Conv2d(3, HIDDEN, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, HIDDEN)), nn.Parameter(torch.randn(1, 17, HIDDEN))
        self.blocks, self.norm = nn.Sequential(ImageBlock(), ImageBlock()), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


class MixerBlock(nn.Module):
    """An MLP over the tokens and one over the features, whose layers are called by keywords."""

    def __init__(self, tokens: int = 16) -> None:
        super().__init__()
        self.n1, self.t1, self.t2 = nn.LayerNorm(HIDDEN), nn.Linear(tokens, 2 * tokens), nn.Linear(2 * tokens, tokens)
        self.n2, self.c1, self.c2 = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.t2(F.gelu(self.t1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.c2(input=F.gelu(self.c1(input=self.n2(input=x))))


class Mixer(nn.Module):
    """A list of blocks of which one was left out."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(48, HIDDEN), nn.Linear(HIDDEN, 12)
        self.blocks = nn.ModuleList([MixerBlock(), None, MixerBlock()])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x if block is None else block(x)
        return self.head(x.mean(dim=1))


class Recommender(nn.Module):
    """Tables of categories, an MLP of numbers, products of all pairs, and an MLP on top."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(4))
        self.top = nn.Sequential(nn.Linear(26, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        d = self.bottom(x)
        z = torch.stack([d] + [table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        i, j = torch.tril_indices(5, 5, -1)
        return torch.sigmoid(self.top(torch.cat([d, torch.bmm(z, z.transpose(1, 2))[:, i, j]], 1)))


class TwoTowers(nn.Module):
    """Images and texts with a contrastive loss over all pairs of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = ImageTransformer(), MinimalGPT(tied=False)
        self.image_out, self.text_out = nn.Linear(10, 16), nn.Linear(WORDS, 16)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        images = F.normalize(self.image_out(self.images(pixels)), dim=-1)
        texts = F.normalize(self.text_out(self.texts(ids, ids)[0].mean(1)), dim=-1)
        logits = self.scale.exp() * images @ texts.t()
        truth = torch.arange(len(logits))
        return (F.cross_entropy(logits, truth) + F.cross_entropy(logits.t(), truth)) / 2


class WrappedBackbone(nn.Module):
    """A stock backbone of transformers inside of somebody's module, with a head of their own."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        self.backbone = LlamaModel(LlamaConfig(vocab_size=96, num_hidden_layers=2, use_cache=False, **sizes))
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids=ids).last_hidden_state[:, -1])


class AttentionUNet(nn.Module):
    """Convolutions, a group norm, attention at the bottom, and a time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.norm = nn.Conv2d(3, HIDDEN, 3, padding=1), nn.GroupNorm(4, HIDDEN)
        self.down = nn.Conv2d(HIDDEN, HIDDEN, 3, 2, 1)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.time = nn.Sequential(nn.Linear(HIDDEN, 64), nn.SiLU(), nn.Linear(64, HIDDEN))
        self.up, self.out = nn.ConvTranspose2d(HIDDEN, HIDDEN, 2, 2), nn.Conv2d(2 * HIDDEN, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(16.0) / 4)
        first = F.silu(self.norm(self.inc(x)))
        h = self.down(first) + self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        b, c, rows, columns = h.shape
        y = h.flatten(2).transpose(1, 2)
        q, k, v = (layer(y).view(b, -1, HEADS, c // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, c))
        return self.out(torch.cat([self.up(h + y.transpose(1, 2).view(b, c, rows, columns)), first], 1))


def ids(words: int = WORDS) -> Tensor:
    return torch.randint(words, (4, 8), generator=torch.Generator().manual_seed(3))


def numbers(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(4))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "minimal GPT": (MinimalGPT, lambda: (ids(), ids())),
    "attention by hand": (lambda: MinimalGPT(flash=False, tied=False), lambda: (ids(), ids())),
    "einsum": (EinsumModel, lambda: (numbers(4, 8, 16),)),
    "image transformer": (ImageTransformer, lambda: (numbers(4, 3, 16, 16),)),
    "mixer": (Mixer, lambda: (numbers(4, 16, 48),)),
    "recommender": (Recommender, lambda: (numbers(8, 13), ids(50).view(8, 4))),
    "two towers": (TwoTowers, lambda: (numbers(4, 3, 16, 16), ids())),
    "wrapped backbone": (WrappedBackbone, lambda: (ids(96),)),
    "U-Net": (AttentionUNet, lambda: (numbers(4, 3, 8, 8), torch.arange(4.0))),
}
