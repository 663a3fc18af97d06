"""Graphs, sets, images, tables, recommenders, and models with the odd things of torch in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.entry import entry, ids, numbers
from zoo.generative import mlp

D, H = 32, 4


def graph(batch: int) -> tuple[Tensor, Tensor]:
    """Features of nodes, and edges as pairs of nodes."""
    nodes = 3 * batch
    return torch.randn(nodes, 8), torch.randint(nodes, (2, 4 * nodes))


@entry("graph convolutions by a sparse matrix", graph)
class SparseGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, D), nn.Linear(D, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        count = len(x)
        values = torch.ones(edges.shape[1]) / count**0.5
        adjacency = torch.sparse_coo_tensor(edges, values, (count, count)).coalesce()
        h = F.relu(torch.sparse.mm(adjacency, self.w1(x)))
        return torch.sparse.mm(adjacency, self.w2(h)).log_softmax(-1)


@entry("graph attention by scatters", graph)
class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Linear(8, D, bias=False), nn.Linear(D, 4)
        self.left, self.right = nn.Parameter(torch.randn(1, H, D // H)), nn.Parameter(torch.randn(1, H, D // H))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.w(x).view(-1, H, D // H)
        e = F.leaky_relu((h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target], 0.2)
        top = torch.full((len(x), H), -1e9).scatter_reduce(0, target[:, None].expand(-1, H), e, "amax")
        e = torch.exp(e - top.detach()[target])
        total = torch.zeros(len(x), H).index_add(0, target, e)
        out = torch.zeros_like(h).index_add(0, target, h[source] * (e / (total[target] + 1e-9)).unsqueeze(-1))
        return self.head(F.elu(out.flatten(1)))


@entry("messages with a recurrent update", graph)
class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.message, self.update = nn.Linear(8, D), mlp(2 * D, D, D), nn.GRUCell(D, D)
        self.gate, self.out = nn.Linear(D, 1), nn.Linear(D, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.inp(x)
        for _ in range(2):
            m = self.message(torch.cat([h[edges[0]], h[edges[1]]], -1))
            h = self.update(torch.zeros_like(h).scatter_add_(0, edges[1][:, None].expand_as(m), m), h)
        return (torch.sigmoid(self.gate(h)) * self.out(h)).sum(0)


@entry("sets of points", numbers(16, 3))
class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, D, 1), nn.BatchNorm1d(D), nn.ReLU())
        self.to_matrix, self.each, self.all = nn.Linear(D, 9), nn.Conv1d(3, 64, 1), mlp(64, D, 5)

    def forward(self, x: Tensor) -> Any:
        x = x.transpose(1, 2)
        matrix = self.to_matrix(self.turn(x).max(2).values).view(-1, 3, 3) + torch.eye(3)
        y = self.each(torch.bmm(matrix, x))
        return self.all(y.max(2).values), (torch.bmm(matrix, matrix.mT) - torch.eye(3)).norm()


@entry("sets with induced points of attention", numbers(9, 6))
class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 4, D))
        self.inp, self.a, self.b = nn.Linear(6, D), *(nn.MultiheadAttention(D, H, batch_first=True) for _ in range(2))
        self.out = mlp(D, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, points = self.inp(x), self.points.repeat(len(x), 1, 1)
        y, _ = self.a(points, x, x)
        return self.out((x + self.b(x, y, y)[0]).sum(1))


class Squeeze(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c)
        self.gate = nn.Sequential(nn.Linear(c, c // 4), nn.ReLU(inplace=True), nn.Linear(c // 4, c), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return F.relu_(x + y * self.gate(F.adaptive_avg_pool2d(y, 1).view(y.shape[:2])).view(*y.shape[:2], 1, 1))


@entry("convolutions with gates of channels", numbers(3, 8, 8))
class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Conv2d(3, D, 3, 1, 1),
            nn.Sequential(Squeeze(D), Squeeze(D)),
            nn.Linear(D, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((-2, -1)))


@entry("windows that are rolled, with biases of places", numbers(8, 8, D))
class Rolled(nn.Module):
    def __init__(self, w: int = 4) -> None:
        super().__init__()
        self.n1, self.qkv, self.proj, self.w = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D), w
        self.table = nn.Parameter(torch.randn((2 * w - 1) ** 2, H) * 0.02)
        at = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
        between = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + w - 1
        self.register_buffer("index", between[..., 0] * (2 * w - 1) + between[..., 1])
        self.merge = nn.Linear(4 * D, 2 * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        s = self.w
        y = torch.roll(self.n1(x), (-s // 2, -s // 2), (1, 2))
        y = y.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        q, k, v = self.qkv(y).reshape(-1, s * s, 3, H, c // H).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(s * s, s * s, H).permute(2, 0, 1)
        p = (q @ k.transpose(-2, -1) * (c // H) ** -0.5 + bias.unsqueeze(0)).softmax(-1)
        y = self.proj((p @ v).transpose(1, 2).reshape(-1, s * s, c))
        y = y.view(b, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(y, (s // 2, s // 2), (1, 2))
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.merge(torch.cat(parts, -1))


@entry("capsules that are routed", numbers(1, 12, 12))
class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.w = nn.Conv2d(1, D, 5, 2), nn.Parameter(torch.randn(1, 64, 5, 6, 8) * 0.1)
        self.decoder = mlp(30, D, 144)

    def forward(self, x: Tensor) -> Any:
        u = F.relu(self.conv(x)).view(len(x), 64, 1, 8, 1)
        u = (self.w @ u).squeeze(-1)
        logits = torch.zeros(len(x), 64, 5, 1)
        for _ in range(2):
            s = (logits.softmax(2) * u).sum(1, keepdim=True)
            n = s.square().sum(-1, keepdim=True)
            v = n / (1 + n) * s / torch.sqrt(n + 1e-8)
            logits = logits + (u * v).sum(-1, keepdim=True)
        return v.flatten(1).norm(dim=-1), self.decoder(v.flatten(1))


@entry(
    "bags of categories beside crosses of features",
    lambda b: (torch.randn(b, 6), torch.randint(50, (b, 3)), torch.randint(40, (b, 5))),
)
class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.tables = (
            nn.EmbeddingBag(40, 8, mode="mean"),
            nn.ModuleList(nn.Embedding(50, 8) for _ in range(3)),
        )
        self.wide, self.cross = nn.Linear(6, 1), nn.ModuleList(nn.Linear(38, 38) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(38, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.0), nn.Linear(64, 1))

    def forward(self, x: Tensor, one: Tensor, many: Tensor) -> Tensor:
        tables = torch.stack([table(one[:, i]) for i, table in enumerate(self.tables)], 1)
        pairs = 0.5 * (tables.sum(1).square() - tables.square().sum(1)).sum(-1, keepdim=True)
        first = torch.cat([x, tables.flatten(1), self.bag(many)], -1)
        y = first
        for layer in self.cross:
            y = first * layer(y) + y
        return torch.sigmoid(self.wide(x) + pairs + self.deep(y))


@entry(
    "two towers with the others of the batch as negatives",
    lambda b: (torch.randint(50, (b, 4)), torch.randint(90, (b,))),
)
class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, D, padding_idx=0), nn.Embedding(90, D)
        self.a, self.b, self.heat = mlp(D, 64, 16), mlp(D, 64, 16), nn.Parameter(torch.tensor(1.0))

    def forward(self, seen: Tensor, item: Tensor) -> Any:
        a = F.normalize(self.a(self.users(seen).mean(1)), dim=-1)
        b = F.normalize(self.b(self.items(item)), dim=-1)
        scores = a @ b.T * self.heat.exp()
        scores = scores.masked_fill((item[:, None] == item[None]) & ~torch.eye(len(item), dtype=torch.bool), -1e4)
        return F.cross_entropy(scores, torch.arange(len(item))), scores.argmax(1)


@entry("margins of angles, and triplets", lambda b: (torch.randn(b, 3, 12), torch.arange(b) % 7))
class Margins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.centres = mlp(12, D, 16), nn.Parameter(torch.randn(7, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, p, n = self.body(x).unbind(1)
        cosine = F.linear(F.normalize(a), F.normalize(self.centres)).clamp(-0.999, 0.999)
        theta = torch.acos(cosine) + 0.3 * F.one_hot(y, 7)
        return F.cross_entropy(8 * torch.cos(theta), y) + F.triplet_margin_loss(a, p, n)


@entry("experts, the best two of each token, by a loop", numbers(6, D))
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(D, 4, bias=False),
            nn.ModuleList(mlp(D, 64, D, act=nn.GELU) for _ in range(4)),
        )

    def forward(self, x: Tensor) -> Any:
        flat = x.view(-1, D)
        probs = self.router(flat).softmax(-1)
        weights, chosen = probs.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            if len(rows):
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        load = F.one_hot(chosen, 4).float().mean((0, 1))
        return out.view_as(x), 4 * (load * probs.mean(0)).sum()


@entry("experts with a capacity, by one-hot einsums", numbers(8, D))
class Capacities(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(D, experts, bias=False)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(experts, D, 48) * 0.1),
            nn.Parameter(torch.randn(experts, 48, D) * 0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        best = F.one_hot(gates.argmax(-1), 4).to(x.dtype)
        place = (best.cumsum(1) - 1) * best
        best = best * (place < 3)
        send = best.unsqueeze(-1) * F.one_hot(place.long().clamp(max=2), 3)
        y = torch.einsum("bsec,bsd->ebcd", send, x)
        y = torch.einsum("ebcf,efd->ebcd", F.gelu(torch.einsum("ebcd,edf->ebcf", y, self.w1)), self.w2)
        return torch.einsum("bsec,ebcd->bsd", send * gates.unsqueeze(-1), y)


class Tokens(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(features, D)), nn.Parameter(torch.randn(features, D))
        self.first = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(-1) * self.weight + self.bias
        return torch.cat([self.first.expand(len(x), 1, D), y], 1)


@entry("a transformer of the columns of a table", numbers(7))
class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = Tokens(7), nn.Sequential(nn.LayerNorm(D), nn.ReLU(), nn.Linear(D, 2))
        layer = nn.TransformerEncoderLayer(D, H, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(x))[:, 0])


@entry("layers with spectral norm and with orthogonal weights", numbers(12))
class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(12, D))
        self.b, self.c = nn.utils.parametrizations.orthogonal(nn.Linear(D, D)), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


@entry("a submodule that torch.compile has taken", numbers(12))
class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.compile(mlp(12, D, D), backend="eager"), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


@entry("a submodule that is a script", numbers(12))
class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.jit.script(mlp(12, D, D)), mlp(D, 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


@entry("weights of complex numbers", numbers(8, 6))
class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, D, dtype=torch.cfloat), nn.Linear(D, 6, dtype=torch.cfloat)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(torch.complex(x, torch.zeros_like(x)))
        y = torch.polar(torch.tanh(y.abs()), y.angle())
        return self.head(self.b(y).abs().mean(1))


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)


class Given(NamedTuple):
    logits: Tensor
    hidden: Tensor


@entry(
    "binary activations, a bilinear layer, low-rank adapters by hand",
    lambda b: (torch.randn(b, 12), torch.randn(b, 12)),
)
class Oddities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(12, D), nn.Linear(12, 4, bias=False), nn.Linear(4, D, bias=False)
        self.both, self.out = nn.Bilinear(D, D, 8), nn.Linear(8, 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Given:
        a, b = (self.base(z) + 2.0 * self.up(self.down(z)) for z in (x, y))
        h = self.both(Halves.apply(a), torch.tanh(b))
        return Given(self.out(h), h)


@entry("a memory that is read and written by attention", ids(5))
class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.control, self.start = (
            nn.Embedding(64, 16),
            nn.LSTMCell(28, D),
            nn.Parameter(torch.randn(10, 12)),
        )
        self.key, self.erase, self.add, self.head = (
            nn.Linear(D, 12),
            nn.Linear(D, 12),
            nn.Linear(D, 12),
            nn.Linear(D + 12, 9),
        )

    def forward(self, x: Tensor) -> Tensor:
        memory, state, read, outs = self.start.expand(len(x), -1, -1), None, torch.zeros(len(x), 12), []
        for token in self.table(x).unbind(1):
            state = self.control(torch.cat([token, read], -1), state)
            w = (5 * F.cosine_similarity(memory, self.key(state[0]).unsqueeze(1), dim=-1)).softmax(-1).unsqueeze(-1)
            read = (w * memory).sum(1)
            memory = (
                memory * (1 - w * torch.sigmoid(self.erase(state[0])).unsqueeze(1)) + w * self.add(state[0])[:, None]
            )
            outs.append(self.head(torch.cat([state[0], read], -1)))
        return torch.stack(outs, 1)
