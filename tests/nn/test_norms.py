"""LayerNorm and RMSNorm on split features against torch's own: values, gradients, bytes, and hard numbers."""

import copy

import pytest
import torch
from module_case import EIGHT, FOUR, TWO, check_rows, close, randn, shard
from products import mesh_of, turned_mesh
from test_linear import message_of

import ndtp
from ndtp import CommMeter, Grid, Layout
from ndtp.testing import assert_close_to_dense, assert_equal

FEATURES, TOKENS = 16, 24


def dense_norm(kind, features=FEATURES, dtype=torch.float64):
    dense = getattr(torch.nn, kind)(features, dtype=dtype, **({"eps": 1e-6} if kind == "RMSNorm" else {}))
    with torch.no_grad():
        for i, parameter in enumerate(dense.parameters()):
            parameter.copy_(1 + randn(features, seed=7 + i))
    return dense


def check_cases(cases, kind, tokens=TOKENS):
    for sizes, scheme in cases:
        mesh = mesh_of(Grid(sizes))
        dense = dense_norm(kind)
        module = getattr(ndtp.nn, kind).from_dense(dense, mesh=mesh, scheme=scheme)
        where = f"{kind}, {mesh.grid}, {scheme}"
        check_rows(mesh.grid, module, dense, tokens, FEATURES, where)
        back = module.to_dense()
        for name, value in dense.state_dict().items():
            assert_equal(back.state_dict()[name], value, f"{where}: to_dense {name}")
        fresh = getattr(ndtp.nn, kind)(FEATURES, mesh=mesh, scheme=scheme, dtype=torch.float64)
        assert fresh.load_state_dict(dense.state_dict()).missing_keys == []
        assert {n: tuple(p.shape) for n, p in fresh.state_dict().items()} == {
            n: tuple(p.shape) for n, p in dense.state_dict().items()
        }
        assert_equal(fresh.to_dense().weight, dense.weight, f"{where}: load_state_dict")


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_equal_dense_on_grids(ranks, kind):
    check_cases([({"x": 1}, "1d")], kind)
    ranks(2).run(check_cases, TWO, kind)
    ranks(4).run(check_cases, FOUR, kind)
    ranks(8).run(check_cases, EIGHT, kind, 56)  # 7 rows a rank: the merge pads them


def check_hard(mesh, axes):
    """A mean far from zero, where the mean of squares less the square of the mean is noise; and padding."""
    layout = Layout(mesh.grid, None, axes)
    for kind in ("LayerNorm", "RMSNorm"):
        for features, pad in ((16, False), (13, True), (3, 8)):
            x = 1e4 + randn(6, features)
            exact, same = dense_norm(kind, features), dense_norm(kind, features, torch.float32)
            module = getattr(ndtp.nn, kind).from_dense(same, mesh=mesh, layout=layout, pad=pad)
            padded = torch.nn.functional.pad(x.float(), (0, module.plan.width - features))
            y = module(shard(padded, layout, mesh))
            real = module.plan.real(mesh.rank)
            start = mesh.rank * y.shape[1]
            part = (slice(None), slice(start, start + real))
            if real:
                assert_close_to_dense(y[:, :real], same(x.float())[part], exact(x.float().double())[part], factor=8)
            assert not y[:, real:].any()


def check_hard_in_any_order():
    """Features are split over axes in the order of the grid, whichever order process groups have."""
    check_hard(mesh_of(Grid(x=4)), "x")
    check_hard(turned_mesh(Grid(x=2, y=2)), ("x", "y"))


def check_padding_gradients():
    mesh = mesh_of(Grid(x=4))
    layout = Layout(mesh.grid, None, "x")
    for kind in ("LayerNorm", "RMSNorm"):
        dense = dense_norm(kind, 5)
        module = getattr(ndtp.nn, kind).from_dense(dense, mesh=mesh, layout=layout, pad=True)
        pad = lambda t: torch.nn.functional.pad(t, (0, 3))  # noqa: E731
        x, upstream = randn(6, 5).requires_grad_(), randn(6, 5, seed=1)
        mine = shard(pad(x), layout, mesh).requires_grad_()
        module(mine).backward(shard(pad(upstream), layout, mesh))
        dense(x).backward(upstream)
        close(mine.grad, shard(pad(x.grad), layout, mesh), "dx")
        for name, parameter in dense.named_parameters():
            close(module.get_parameter(name).grad.full_tensor(), pad(parameter.grad), f"d{name}")


def check_low_precision():
    """bf16 rows: statistics in fp32, counted as such."""
    mesh = mesh_of(Grid(x=2, y=2))
    for kind in ("LayerNorm", "RMSNorm"):
        dense = dense_norm(kind, dtype=torch.bfloat16)
        module = getattr(ndtp.nn, kind).from_dense(dense, mesh=mesh, scheme="2d")
        x = randn(TOKENS, FEATURES).bfloat16()
        mine = shard(x, module.in_layout, mesh).requires_grad_()
        with CommMeter() as meter:
            y = module(mine)
            y.backward(torch.ones_like(y))
        expected, exact = dense(x), dense_norm(kind).to(torch.bfloat16).double()(x.double())
        parts = [shard(t, module.out_layout, mesh) for t in (expected, exact)]
        assert_close_to_dense(y, *parts)
        assert meter.volume == module.volume(TOKENS), meter.volume
        for eps in (0.5, None) if kind == "RMSNorm" else (0.5,):  # as code may set it of either
            dense.eps = module.eps = eps
            given = x * 1e-2
            exact = copy.deepcopy(dense).double()
            exact.eps = eps or torch.finfo(torch.float32).eps  # in which torch computes
            parts = [shard(t, module.out_layout, mesh) for t in (dense(given), exact(given.double()))]
            assert_close_to_dense(module(shard(given, module.in_layout, mesh)), *parts)


def test_hard_numbers(ranks):
    ranks(4).run(check_hard_in_any_order)
    ranks(4).run(check_padding_gradients)
    ranks(4).run(check_low_precision)


def check_accumulated():
    """Gradients of gains are held back under `accumulate`, as those of weights are, and add up."""
    mesh = mesh_of(Grid(dp=2, x=2))
    dense = dense_norm("LayerNorm")
    module = ndtp.nn.LayerNorm.from_dense(dense, mesh=mesh, scheme="1d-sp")
    parts = [randn(TOKENS, FEATURES, seed=s) for s in range(3)]
    with CommMeter() as meter:
        for i, x in enumerate(parts):
            mine = shard(x, module.in_layout, mesh)
            if i < 2:
                with mesh.accumulate():
                    (module(mine) ** 2).sum().backward()
                assert module.weight.grad is None, "held back"
            else:
                (module(mine) ** 2).sum().backward()
            (dense(x) ** 2).sum().backward()
    for name, parameter in dense.named_parameters():
        close(module.get_parameter(name).grad.full_tensor(), parameter.grad, name)
    # Of gain and bias one all-reduce each, for three micro-batches; a fourth takes no more.
    assert meter.volume.by("phase")["wgrad"] == module.volume(TOKENS).by("phase")["wgrad"]
    assert not mesh.collectives.in_flight


def check_meta_and_memory():
    mesh = mesh_of(Grid(x=2, y=2))
    module = ndtp.nn.LayerNorm(FEATURES, mesh=mesh, scheme="2d", device="meta")
    assert module.weight.is_meta
    module.to_empty(device=torch.get_default_device().type).reset_parameters()
    assert_equal(module.to_dense().weight, torch.ones(FEATURES), "reset")
    memory = module.memory(64)
    rows = 64 // 2
    x = rows * FEATURES // 2 * 4
    assert memory.gradients == x + 2 * FEATURES // 2 * 4 and memory.kept == 2 * rows * 4, memory
    gemma = ndtp.nn.RMSNorm(FEATURES, 1e-6, mesh=mesh, scheme="2d", offset=1.0)
    assert not gemma.weight.full_tensor().any() and gemma.to_dense().weight.min() == 1
    return [
        message_of(lambda: ndtp.nn.LayerNorm(15, mesh=mesh, scheme="2d")),
        message_of(lambda: ndtp.nn.LayerNorm.from_dense(torch.nn.LayerNorm((4, 4)), mesh=mesh)),
        message_of(lambda: module(torch.ones(4, 4))),
    ]


def test_accumulation_meta_and_errors(ranks):
    ranks(4).run(check_accumulated)
    messages = ranks(4).run(check_meta_and_memory)
    assert all(message == messages[0] for message in messages)
    for message, word in zip(messages[0], ("pad=True", "a grid splits one", "a rank has [rows, 8]"), strict=True):
        assert word in message
