"""Norms, embeddings, losses and whole decoder layers under `torch.compile(fullgraph=True)`: as they are eagerly."""

import pytest
import torch
from module_case import close, randn
from products import mesh_of
from torch._dynamo.testing import CompileCounterWithBackend
from turns import by_turns

import ndtp
from ndtp import Grid, Layout


class DecoderLayer(torch.nn.Module):
    """With all that an attention has: heads that share keys, rotated positions, norms of queries and keys."""

    def __init__(self, **on):
        super().__init__()
        self.norms = torch.nn.ModuleList([ndtp.nn.RMSNorm(16, **on), ndtp.nn.LayerNorm(16, **on)])
        self.attention = ndtp.nn.Attention(16, 4, 2, positions=ndtp.nn.Rotary(), qk_norm="rms", **on)
        self.mlp = ndtp.nn.GatedMLP(16, 24, **on)

    def forward(self, x, length):
        x = x + self.attention(self.norms[0](x), length)
        return x + self.mlp(self.norms[1](x))


class Residual(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x.tanh()).tanh()


def modules(mesh, scheme):
    """(module, its inputs) by name: rows that are split, features that are, some of them padding."""
    layouts = ndtp.nn.Linear(16, 24, mesh=mesh, scheme=scheme, dtype=torch.float64, pad=True)
    options = {"mesh": mesh, "dtype": torch.float64}
    x = layouts.in_layout.shard(randn(8, 16), mesh.rank).clone()
    by_feature = Layout(mesh.grid, None, "x")
    head = ndtp.nn.Linear(16, 21, mesh=mesh, scheme=scheme, dtype=torch.float64, pad=True)
    targets = torch.arange(8).masked_fill(torch.arange(8) == 3, -100)
    width = head.out_layout.shard_shape((8, head.padded_out))
    weights = torch.linspace(1, 2, 21, dtype=torch.float64)
    loss = {"layout": head.out_layout, "mesh": mesh, "classes": 21}
    return {
        "layer": (ndtp.nn.LayerNorm(15, layout=by_feature, pad=True, **options), (by_feature.shard(
            torch.nn.functional.pad(randn(8, 15), (0, 1)), mesh.rank).clone(),)),
        "embedding": (ndtp.nn.Embedding(20, 16, scheme=scheme, **options), (torch.arange(8),)),
        "weighted": (ndtp.nn.CrossEntropy(**loss, weight=weights, label_smoothing=0.1, z_loss=0.01),
                     (randn(*width, seed=mesh.rank), targets)),
        "head": (ndtp.nn.LinearCrossEntropy(head, chunk_rows=2), (x, targets)),
        "decoder layer": (DecoderLayer(scheme=scheme, **options), (x, 8)),  # a sequence, of which a rank has a part
    }  # fmt: skip


def run(function, module, given):
    inputs = [a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
              for a in given]  # fmt: skip
    y = function(*inputs)
    y.square().sum().backward()
    found = [y.detach(), *(a.grad for a in inputs if isinstance(a, torch.Tensor) and a.grad is not None)]
    for parameter in module.parameters():
        grad = parameter.grad
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
        parameter.grad = None
    return found


def check_compiled(sizes, scheme):
    mesh = mesh_of(Grid(sizes))
    for name, (module, given) in by_turns(modules(mesh, scheme).items(), 3):
        torch._dynamo.reset()
        found = run(torch.compile(module, fullgraph=True, backend="aot_eager"), module, given)  # never called before
        expected = run(module, module, given)
        assert len(found) == len(expected) > 1, name
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs, f"{name}, {mesh.grid}")
    torch._dynamo.reset()
    table = ndtp.nn.Embedding(20, 16, mesh=mesh, scheme=scheme)
    table(torch.arange(8))
    embedding = torch.compile(table, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="no row of the table"):
        embedding(torch.full((8,), 20))
    check_experts(mesh, scheme)


def check_experts(mesh, scheme):
    """A graph before a layer of experts, and one behind it, for all routings; and why not one alone."""
    on = {"mesh": mesh, "scheme": scheme, "dtype": torch.float64}
    moe = ndtp.nn.MoE(16, 24, 4, seed=1, chunks=2, **on)
    model = Residual(moe)
    counted = CompileCounterWithBackend("aot_eager")
    for seed in range(3):
        x = moe.in_layout.shard(randn(8, 16, seed=seed), mesh.rank)
        found, expected = run(torch.compile(model, backend=counted), model, [x]), run(model, model, [x])
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs, f"experts, {mesh.grid}")
    assert counted.frame_count == 2
    x = x.clone().requires_grad_()
    torch.compile(lambda x: model(x).square().sum().backward(), backend="aot_eager")(x)  # a step as a whole
    close(x.grad, expected[1], "a compiled step")
    alone = torch.compile(moe, backend=counted)
    close(alone(x), moe(x), "experts alone")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="numbers of the batch"):
        torch.compile(model, fullgraph=True, backend=counted)(x)


@pytest.mark.cpu
def test_one_graph(ranks):
    ranks(2).run(check_compiled, {"x": 2}, "1d-sp")
