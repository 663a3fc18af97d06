"""Attention against its dense twin, and that against torch's: heads, rows, norms, masks, positions, caches, bytes."""

import torch
from module_case import EIGHT, FOUR, TWO, check_gradients, close, randn, shard
from products import mesh_of
from test_linear import message_of

import ndtp
from ndtp import CommMeter, Grid
from ndtp.nn.attention_dense import split_projections
from ndtp.testing import assert_equal

HIDDEN = 16


def by_distance(x, positions):
    """A position function of the caller's own."""
    return x * (1 + 0.1 * positions[:, None, None])


# Arguments of the module, and of a call with `batch` sequences.
FORMS = {
    "mha": ({"heads": 4, "bias": True, "positions": ndtp.nn.Rotary()}, None),
    "gqa": ({"heads": 8, "kv_heads": 2, "head_dim": 4, "qk_norm": "rms", "window": 3}, "padding"),
    "mqa": ({"heads": 4, "kv_heads": 1, "qk_norm": "layer-features", "causal": False, "out_bias": True}, "padding"),
    "odd": ({"heads": 12, "kv_heads": 3, "head_dim": 4, "positions": by_distance, "scale": 0.3}, "added"),
    "gpt-j": ({"heads": 4, "positions": ndtp.nn.Rotary(dims=2, interleaved=True), "qk_norm": "layer"}, "ids"),
}


def dense_attention(form, dtype=torch.float64):
    dense = ndtp.nn.DenseAttention(HIDDEN, dtype=dtype, **FORMS[form][0])
    with torch.no_grad():
        for i, parameter in enumerate(dense.parameters()):
            parameter.copy_(0.5 * randn(*parameter.shape, seed=20 + i))
    return dense


def call_of(form, batch, length, heads):
    kind = FORMS[form][1]
    if kind == "padding":
        mask = torch.ones(batch, length, dtype=torch.bool)
        mask[0, -2:] = False
        return {"mask": mask}
    if kind == "added":
        return {"mask": randn(1, heads, length, length, seed=8)}
    if kind == "ids":
        return {"position_ids": (torch.arange(length) + 3 * torch.arange(batch)[:, None])}
    return {}


def check_attention(mesh, scheme, form, batch, length, **arguments):
    where = f"{mesh.grid}, {scheme}, {form}, {batch} x {length}"
    dense = dense_attention(form)
    module = ndtp.nn.Attention.from_dense(dense, mesh=mesh, scheme=scheme, **arguments)
    call = call_of(form, batch, length, dense.heads)
    x, upstream = randn(batch, length, HIDDEN).requires_grad_(), randn(batch, length, HIDDEN, seed=1)
    mine = shard(x.flatten(0, 1), module.in_layout, mesh).requires_grad_()
    with CommMeter() as meter:
        y = module(mine, length, **call)
        y.backward(shard(upstream.flatten(0, 1), module.out_layout, mesh))
    expected = dense(x, **call)
    expected.backward(upstream)
    close(y, shard(expected.flatten(0, 1), module.out_layout, mesh), f"{where}: y")
    close(mine.grad, shard(x.grad.flatten(0, 1), module.in_layout, mesh), f"{where}: dx")
    check_gradients(module, dense, where)
    predicted = module.volume(batch, length)
    assert meter.volume == predicted, f"{where}: measured {meter.volume}, predicted {predicted}"
    assert not mesh.collectives.in_flight, where


def check_cases(cases):
    for (sizes, scheme), form, shape in cases:
        check_attention(mesh_of(Grid(sizes)), scheme, form, *shape)


def test_equals_dense_on_grids(ranks):
    check_cases([(({"x": 1}, "1d"), form, (3, 4)) for form in FORMS])
    ranks(2).run(check_cases, list(zip(TWO, ("mha", "mqa", "odd"), [(2, 6), (1, 4), (2, 4)], strict=True)))
    ranks(4).run(check_cases, [(case, form, (4, 4)) for case, form in zip(FOUR, FORMS, strict=True)])


def test_sequences_that_are_cut(ranks):
    """One sequence for all ranks; one and a half for each."""
    plane, cube = FOUR[1], FOUR[4]
    shapes = [(plane, "mha", (1, 8)), (plane, "odd", (3, 8)), (cube, "gqa", (1, 8)), (cube, "mqa", (3, 8))]
    ranks(4).run(check_cases, [*shapes, (cube, "gpt-j", (3, 4))])


def test_axes_that_are_taken_apart(ranks):
    """Two key heads on four ranks, two sequences on four ranks, and three dimensions."""
    line, rows = ({"x": 4}, "1d-sp"), ({"z": 4}, "3d")
    ranks(4).run(
        check_cases,
        [(line, "gqa", (4, 4)), (line, "odd", (4, 4)), (rows, "mha", (2, 8)), (rows, "gqa", (1, 8))],
    )
    ranks(8).run(check_cases, [(EIGHT[0], "mha", (4, 4)), (EIGHT[0], "odd", (2, 8)), (EIGHT[1], "gqa", (4, 4))])


# ---- the dense twin ----


def test_the_dense_twin_is_torchs():
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(HIDDEN, 4, batch_first=True, dtype=torch.float64)
    mine = ndtp.nn.DenseAttention(HIDDEN, 4, bias=True, causal=False, dtype=torch.float64)
    parts = zip(theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
    with torch.no_grad():
        for projection, (weight, bias) in zip((mine.q_proj, mine.k_proj, mine.v_proj), parts, strict=True):
            projection.weight.copy_(weight), projection.bias.copy_(bias)
        mine.o_proj.load_state_dict(theirs.out_proj.state_dict())
    x = randn(2, 5, HIDDEN)
    copied = ndtp.nn.DenseAttention.of_multihead(theirs)
    close(copied(x), theirs(x, x, x, need_weights=False)[0], "of_multihead")
    close(mine(x), theirs(x, x, x, need_weights=False)[0], "MultiheadAttention")


def test_grouped_heads_windows_and_rotation_by_hand():
    dense = ndtp.nn.DenseAttention(HIDDEN, 4, 2, window=3, positions=ndtp.nn.Rotary(theta=100.0), dtype=torch.float64)
    x = randn(1, 6, HIDDEN)
    q, k, v = (p(x[0]).unflatten(-1, (-1, 4)) for p in (dense.q_proj, dense.k_proj, dense.v_proj))
    turn = torch.polar(
        torch.ones(6, 2, dtype=torch.float64),
        torch.outer(torch.arange(6.0).double(), 100.0 ** -torch.tensor([0, 0.5]).double()),
    )

    def rotated(t):
        z = torch.complex(t[..., :2], t[..., 2:]) * turn[:, None]
        return torch.cat((z.real, z.imag), -1)

    k, v = rotated(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / 2
    distance = torch.arange(6)[:, None] - torch.arange(6)
    scores = scores.masked_fill((distance < 0) | (distance >= 3), -torch.inf)
    y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    close(dense(x)[0], dense.o_proj(y), "by hand")


def test_fused_projections_come_apart():
    heads, kv_heads, dim = 4, 2, 3
    fused = torch.nn.Linear(5, (heads + 2 * kv_heads) * dim, dtype=torch.float64)
    x = randn(7, 5)
    y = fused(x)
    q, k, v = (layer(x) for layer in split_projections(fused, heads, kv_heads))
    close(torch.cat((q, k, v), 1), y, "all queries, all keys, all values")
    q, k, v = (layer(x).unflatten(1, (kv_heads, -1)) for layer in split_projections(fused, heads, kv_heads, "groups"))
    close(torch.cat((q, k, v), 2).flatten(1), y, "by groups")
    message = message_of(lambda: split_projections(fused, 5, 1))
    assert "not those of 5 heads" in message
    attention = ndtp.nn.DenseAttention.of(*split_projections(fused, 4, 2), torch.nn.Linear(12, 5).double(), 4, 2)
    assert attention(randn(1, 3, 5)).shape == (1, 3, 5)


# ---- caches, use, errors ----


def check_generation(sizes, scheme, form, batch):
    """A prompt, then token by token: the outputs of all at once."""
    mesh = mesh_of(Grid(sizes))
    dense = dense_attention(form)
    module = ndtp.nn.Attention.from_dense(dense, mesh=mesh, scheme=scheme)
    x = randn(batch, 8, HIDDEN)
    whole = dense(x)
    mine, theirs = ndtp.nn.KVCache(), ndtp.nn.KVCache()
    start = 0
    for length in (4, 1, 1, 2):
        part = x[:, start : start + length]
        y = module(shard(part.flatten(0, 1), module.in_layout, mesh), length, cache=mine)
        expected = dense(part, cache=theirs)
        close(expected, whole[:, start : start + length], "the dense cache")
        close(
            y, shard(expected.flatten(0, 1), module.out_layout, mesh), f"{scheme}, tokens {start} to {start + length}"
        )
        start += length
    assert mine.length == 8


def check_use():
    mesh = mesh_of(Grid(x=2, y=2))
    dense = dense_attention("gqa")
    module = ndtp.nn.Attention.from_dense(dense, mesh=mesh, scheme="2d", chunks=2, regather=("a",))
    back = module.to_dense()
    for name, value in dense.state_dict().items():
        assert_equal(back.state_dict()[name], value, name)
    assert list(module.state_dict()) == list(dense.state_dict())
    fresh = ndtp.nn.Attention.from_dense(dense_attention("gqa"), mesh=mesh, scheme="2d")
    fresh.reset_parameters(4)
    fresh.load_state_dict(dense.state_dict())
    x = randn(4, 8, HIDDEN)
    mine = shard(x.flatten(0, 1), module.in_layout, mesh).unflatten(0, (2, 8))
    expected = shard(dense(x).flatten(0, 1), module.out_layout, mesh).unflatten(0, (2, 8))
    close(module(mine), expected, "whole sequences tell their length")
    close(fresh(mine), expected, "load_state_dict")
    # A hook on a projection has it called, and the others too.
    seen = []
    fresh.k_proj.register_forward_hook(lambda *_: seen.append(1))
    close(fresh(mine), expected, "with a hook")
    assert seen == [1]
    memory = module.memory(4, 8)
    assert memory.gradients > 0 and memory.peak > memory.kept > 0
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    leaf = mine.clone().requires_grad_()
    with CommMeter() as meter:
        module(leaf).sum().backward()
    assert meter.volume == module.volume(4, 8), "frozen"
    return [
        message_of(lambda: module(mine.flatten(0, 1))),
        message_of(lambda: module(mine.flatten(0, 1), 3)),
        message_of(lambda: module(mine, mask=torch.ones(3, 8))),
        message_of(lambda: ndtp.nn.Attention(HIDDEN, 3, head_dim=4, mesh=mesh, scheme="2d")),
        message_of(lambda: ndtp.nn.Attention(HIDDEN, 5, mesh=mesh, scheme="2d")),
    ]


def initial(sizes, scheme):
    mesh = mesh_of(Grid(sizes))
    dense = ndtp.nn.Attention(HIDDEN, 4, 2, bias=True, mesh=mesh, scheme=scheme, seed=3).to_dense()
    return [parameter.detach() for parameter in dense.parameters()]


def test_caches_use_and_errors(ranks):
    ranks(4).run(check_generation, {"x": 2, "y": 2}, "2d", "mha", 4)
    ranks(4).run(check_generation, {"x": 4}, "1d", "mha", 1)
    messages = ranks(4).run(check_use)
    assert all(message == messages[0] for message in messages)
    words = (
        "give length=",
        "not whole sequences of 3",
        "a mask (3, 8)",
        "heads over {1, 3} ranks, or 4",
        "give head_dim",
    )
    for message, word in zip(messages[0], words, strict=True):
        assert word in message
    for values in ranks(4).run(initial, {"x": 2, "y": 2}, "2d"):
        for value, expected in zip(values, initial({"x": 1}, "1d"), strict=True):
            assert_equal(value, expected, "the same seed")
