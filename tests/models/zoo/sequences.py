"""Models of sequences: recurrent ones, state spaces, transforms, and attention in its many forms."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.entry import entry, ids, numbers

D, H, WORDS = 32, 4, 64


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


@entry("LSTM language model", ids(12, targets=True))
class LSTMModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(WORDS, D), nn.LSTM(D, 48, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, WORDS)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        y, _ = self.lstm(self.table(x))
        logits = self.head(self.norm(y))
        return logits, loss_of(logits, targets)


@entry("GRU encoder and decoder with additive attention", ids(10))
class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, D)
        self.encoder, self.decoder = nn.GRU(D, D, bidirectional=True, batch_first=True), nn.GRUCell(3 * D, D)
        self.w, self.u, self.v = nn.Linear(2 * D, D), nn.Linear(D, D), nn.Linear(D, 1, bias=False)
        self.bridge, self.head = nn.Linear(2 * D, D), nn.Linear(3 * D, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        memory, last = self.encoder(self.table(x))
        state, keys = torch.tanh(self.bridge(torch.cat([last[0], last[1]], -1))), self.w(memory)
        outs = []
        for t in range(4):
            scores = self.v(torch.tanh(keys + self.u(state)[:, None])).squeeze(-1)
            context = (scores.softmax(-1).unsqueeze(1) @ memory).squeeze(1)
            state = self.decoder(torch.cat([self.table(x[:, t]), context], -1), state)
            outs.append(self.head(torch.cat([state, context], -1)))
        return torch.stack(outs, 1)


@entry("tagger with a conditional random field", ids(9, 8, targets=True))
class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(WORDS, D), nn.LSTM(D, D // 2, bidirectional=True, batch_first=True)
        self.emit, self.moves = nn.Linear(D, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        scores = self.emit(self.rnn(self.table(x))[0])
        alpha = scores[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.moves, dim=1) + scores[:, t]
        gold = scores.gather(2, tags.unsqueeze(-1)).squeeze(-1).sum(1) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        return (torch.logsumexp(alpha, 1) - gold).mean()


@entry("cells in a loop, with a state that is kept in place", numbers(6, 16))
class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.cell, self.head = nn.Linear(16, D), nn.LSTMCell(D, D), nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(len(x), D), x.new_zeros(len(x), D)
        outs = x.new_zeros(len(x), x.shape[1], 5)
        for t in range(x.shape[1]):
            h, c = self.cell(F.relu(self.inp(x[:, t])), (h, c))
            outs[:, t] = self.head(h)
        return outs


@entry("temporal convolutions with weight norm", numbers(6, 20))
class TemporalConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(norm(nn.Conv1d(6 if i == 0 else D, D, 3, dilation=2**i)) for i in range(2))
        self.head = nn.Sequential(norm(nn.Linear(D, 2 * D)), nn.ReLU(), nn.Linear(2 * D, 7))

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            y = F.relu(conv(F.pad(x, (2 * 2**i, 0))))
            x = y + x if x.shape == y.shape else y
        return self.head(x[:, :, -1])


@entry("selective state space, in Python", ids(10, targets=True))
class SelectiveStates(nn.Module):
    def __init__(self, inner: int = 2 * D, states: int = 4, rank: int = 4) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, D), nn.RMSNorm(D)
        self.in_proj, self.conv = (
            nn.Linear(D, 2 * inner, bias=False),
            nn.Conv1d(inner, inner, 4, groups=inner, padding=3),
        )
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(inner, 1))
        self.d, self.out_proj, self.sizes = (
            nn.Parameter(torch.ones(inner)),
            nn.Linear(inner, D, bias=False),
            (rank, states),
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        u, gate = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        rank, states = self.sizes
        dt, b, c = self.x_proj(u).split([rank, states, states], dim=-1)
        dt, a = F.softplus(self.dt_proj(dt)), -torch.exp(self.log_a.float())
        decay = torch.exp(torch.einsum("bld,dn->bldn", dt, a))
        drive = torch.einsum("bld,bln,bld->bldn", dt, b, u)
        state, ys = torch.zeros_like(drive[:, 0]), []
        for t in range(u.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            ys.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
        y = (torch.stack(ys, 1) + u * self.d) * F.silu(gate)
        return loss_of(F.linear(x + self.out_proj(y), self.table.weight.detach() * 1.0), targets)


@entry("mixing of tokens by time, as RWKV", numbers(8, D))
class TimeMixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.linspace(-3, 0, D)), nn.Parameter(torch.zeros(D))
        self.mix = nn.Parameter(torch.rand(3, 1, 1, D))
        self.key, self.value, self.receptance = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.output, self.shift = nn.Linear(D, D, bias=False), nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        last = self.shift(x)
        k, v, r = (
            f(x * m + last * (1 - m)) for f, m in zip((self.key, self.value, self.receptance), self.mix, strict=True)
        )
        top, bottom = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        w, ys = torch.exp(-torch.exp(self.decay)), []
        for t in range(x.shape[1]):
            e = torch.exp(k[:, t].clamp(max=10))
            ys.append((top + torch.exp(self.first) * e * v[:, t]) / (bottom + torch.exp(self.first) * e + 1e-6))
            top, bottom = w * top + e * v[:, t], w * bottom + e
        return self.output(torch.sigmoid(r) * torch.stack(ys, 1))


@entry("retention with a decay by head", numbers(8, D))
class Retention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.g, self.o = (nn.Linear(D, D, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(H, D)
        self.register_buffer("gamma", 1 - 2.0 ** (-5 - torch.arange(H)))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, H, -1).permute(0, 2, 1, 3) for f in (self.q, self.k, self.v))
        n = torch.arange(t)
        decay = self.gamma[:, None, None] ** (n[:, None] - n[None]).clamp(min=0) * (n[:, None] >= n[None])
        y = (q @ k.transpose(-1, -2) * decay) @ v
        y = self.norm(y.permute(0, 2, 1, 3).reshape(b * t, D)).view(b, t, D)
        return self.o(F.silu(self.g(x)) * y)


@entry("linear attention", numbers(8, D))
class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, H, D // H).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = 1 / (torch.einsum("bthd,bhd->bth", q, k.sum(1)) + 1e-6)
        y = torch.einsum("bthd,bhde,bth->bthe", q, torch.einsum("bthd,bthe->bhde", k, v), z)
        return x + self.o(y.reshape(b, t, D))


@entry("diagonal state space of complex numbers", numbers(16, D))
class ComplexStates(nn.Module):
    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(D) - 3)
        self.c = nn.Parameter(torch.view_as_real(torch.randn(D, states, dtype=torch.cfloat)))
        self.a = nn.Parameter(torch.log(0.5 * torch.ones(D, states)))
        self.im, self.skip = nn.Parameter(math.pi * torch.arange(states).repeat(D, 1)), nn.Parameter(torch.randn(D))
        self.out, self.head = nn.Linear(D, 2 * D), nn.Linear(D, 10)

    def forward(self, u: Tensor) -> Tensor:
        length, u = u.shape[1], u.transpose(1, 2)
        a = -torch.exp(self.a) + 1j * self.im
        dt = a * torch.exp(self.log_dt)[:, None]
        c = torch.view_as_complex(self.c) * (torch.exp(dt) - 1.0) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(dt[..., None] * torch.arange(length))).real
        y = torch.fft.irfft(torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(u, n=2 * length), n=2 * length)
        y = F.gelu(y[..., :length] + u * self.skip[:, None]).transpose(1, 2)
        return self.head(F.glu(self.out(y), dim=-1).mean(1))


@entry("Fourier transforms in the place of attention", ids(8))
class FourierMixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.n1, self.n2 = nn.Embedding(WORDS, D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down, self.head = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.Linear(D, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = self.n1(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return self.head(self.n2(x + self.down(F.gelu(self.up(x)))))


@entry("transformer with relative positions and memories", ids(8))
class WithMemories(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.q, self.kv = (
            nn.Embedding(WORDS, D),
            nn.Linear(D, D, bias=False),
            nn.Linear(D, 2 * D, bias=False),
        )
        self.r, self.o, self.norm = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False), nn.LayerNorm(D)
        self.u, self.w = nn.Parameter(torch.randn(H, D // H)), nn.Parameter(torch.randn(H, D // H))

    def forward(self, tokens: Tensor) -> Any:
        x, memory = self.table(tokens), None
        for part in x.chunk(2, dim=1):
            both = part if memory is None else torch.cat([memory, part], 1)
            b, t, n = part.shape[0], part.shape[1], both.shape[1]
            q = self.q(part).view(b, t, H, -1)
            k, v = (y.view(b, n, H, -1) for y in self.kv(both).chunk(2, -1))
            places = torch.arange(n - 1, -1, -1.0)[:, None] / 10.0 ** (torch.arange(D // 2) / D)
            r = self.r(torch.cat([places.sin(), places.cos()], -1)).view(n, H, -1)
            ac, bd = torch.einsum("bihd,bjhd->bhij", q + self.u, k), torch.einsum("bihd,jhd->bhij", q + self.w, r)
            bd = F.pad(bd, (1, 0)).view(b, H, n + 1, t)[:, :, 1:].view_as(bd)
            mask = torch.ones(t, n, dtype=torch.bool).triu(1 + n - t)
            p = ((ac + bd) / (D // H) ** 0.5).masked_fill(mask, -1e9).softmax(-1)
            y = self.norm(part + self.o(torch.einsum("bhij,bjhd->bihd", p, v).reshape(b, t, D)))
            memory = y.detach()
        return y, memory


@entry("attention with linear biases in windows of keys", numbers(8, D))
class Windows(nn.Module):
    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.qkv, self.o, self.window = nn.Linear(D, 3 * D), nn.Linear(D, D), window
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, H + 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, H, -1).transpose(1, 2) for y in self.qkv(x).split(D, -1))
        k, v = (F.pad(y, (0, 0, self.window - 1, 0)).unfold(2, self.window, 1) for y in (k, v))
        scores = torch.einsum("bhtd,bhtdw->bhtw", q, k) - self.slopes[:, None, None] * torch.arange(self.window).flip(0)
        return x + self.o(torch.einsum("bhtw,bhtdw->bhtd", scores.softmax(-1), v).transpose(1, 2).flatten(2))


@entry("latent attention with few key heads and rotations of complex numbers", numbers(8, D))
class LatentAttention(nn.Module):
    def __init__(self, rank: int = 12, rope: int = 4) -> None:
        super().__init__()
        self.q, self.down, self.up = nn.Linear(D, H * 12), nn.Linear(D, rank + rope), nn.Linear(rank, H * 16)
        self.norm, self.o, self.sizes = nn.RMSNorm(rank), nn.Linear(H * 8, D), (rank, rope)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        rank, rope = self.sizes
        turn = torch.polar(torch.ones(t, rope // 2), torch.outer(torch.arange(t), 1 / 10.0 ** torch.arange(rope // 2)))
        spin = lambda y: torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn[:, None]).flatten(3)  # noqa: E731
        q, q_pe = self.q(x).view(b, t, H, 12).split([8, rope], -1)
        c, k_pe = self.down(x).split([rank, rope], -1)
        k, v = self.up(self.norm(c)).view(b, t, H, 16).chunk(2, -1)
        q = torch.cat([q, spin(q_pe)], -1)
        k = torch.cat([k, spin(k_pe.unsqueeze(2)).expand(-1, -1, H, -1)], -1)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


@entry("one layer that is used many times, until it halts", numbers(6, D))
class Universal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, H, 64, dropout=0.0, batch_first=True)
        self.halt = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Any:
        left, total = torch.ones(x.shape[:2]), torch.zeros_like(x)
        for step in range(3):
            p = torch.sigmoid(self.halt(x)).squeeze(-1) if step < 2 else torch.ones(x.shape[:2])
            x = checkpoint(self.layer, x, use_reentrant=False) if self.training else self.layer(x)
            total, left = total + (left * p).unsqueeze(-1) * x, left * (1 - p)
        return total, left.mean()


@entry("a vocabulary with words that are copied", ids(8))
class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(WORDS, D), nn.GRU(D, D, batch_first=True)
        self.query, self.head, self.gate = nn.Linear(D, D), nn.Linear(2 * D, WORDS), nn.Linear(2 * D, 1)

    def forward(self, x: Tensor) -> Tensor:
        memory, _ = self.rnn(self.table(x))
        copy = torch.softmax(self.query(memory) @ memory.transpose(1, 2), -1)
        both = torch.cat([memory, copy @ memory], -1)
        p = torch.sigmoid(self.gate(both))
        words = p * self.head(both).softmax(-1)
        return torch.log(words.scatter_add(2, x[:, None].expand_as(copy), (1 - p) * copy) + 1e-8)


@entry("speech with a connectionist temporal loss", numbers(40, 13))
class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(13, D, 5, 2, 2), nn.BatchNorm1d(D)
        self.rnn, self.head = nn.GRU(D, D, bidirectional=True), nn.Linear(2 * D, 11)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x.transpose(1, 2)))).permute(2, 0, 1)
        logs = self.head(self.rnn(y)[0]).log_softmax(-1)
        targets = torch.arange(1, 5).repeat(x.shape[0], 1)
        return F.ctc_loss(logs, targets, torch.full((len(x),), logs.shape[0]), torch.full((len(x),), 4))


@entry("torch's transformer, sequence first, with masks", lambda b: (torch.randn(7, b, D), torch.randn(5, b, D)))
class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.head = nn.Transformer(D, H, 1, 1, 64, dropout=0.0), nn.Linear(D, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(target))
        return self.head(self.both(source, target, tgt_mask=mask))


@entry("a forecast of blocks that take their own part away", numbers(24))
class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 12)) for _ in range(3)
        )
        t = torch.linspace(0, 1, 36)
        basis = torch.stack([torch.cos(2 * math.pi * i * t) for i in range(6)])
        self.register_buffer("back", basis[:, :24])
        self.register_buffer("ahead", basis[:, 24:])

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x), 12)
        for block in self.blocks:
            a, b = block(x).chunk(2, -1)
            x, total = x - a @ self.back, total + b @ self.ahead
        return total


@entry("words that are rare, by an adaptive softmax", ids(6, targets=True))
class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(WORDS, D), nn.Linear(D, 2 * D)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(2 * D, WORDS, [16, 32], div_value=2.0)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.table(x))).flatten(0, 1), targets.flatten()).loss


@entry("layers of its own, and no nn.Linear", numbers(6, 8))
class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(D, 8) * 0.3), nn.Parameter(torch.randn(8, D) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sin(F.linear(x, self.a)), self.b)
