"""Dropout of attention weights, and state dicts in which queries, keys and values are one weight."""

import pytest
import torch
from module_case import close, randn
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid, LayoutError
from ndtp.nn.attention_dense import split_projections
from ndtp.testing import assert_equal

HIDDEN = 16


def dense_attention(**options):
    dense = ndtp.nn.DenseAttention(HIDDEN, heads=4, kv_heads=2, bias=True, dtype=torch.float64, **options)
    with torch.no_grad():
        for i, parameter in enumerate(dense.parameters()):
            parameter.copy_(0.5 * randn(*parameter.shape, seed=20 + i))
    return dense


def check_dropout(cases):
    """The mask is that of the dense twin, for whole sequences, parts of them, and parts of key heads."""
    for sizes, scheme, batch, length in cases:
        mesh = mesh_of(Grid(sizes))
        where = f"{mesh.grid}, {scheme}, {batch} x {length}"
        dense = dense_attention(dropout=0.4, positions=ndtp.nn.Rotary())
        module = ndtp.nn.Attention.from_dense(dense, mesh=mesh, scheme=scheme)
        x = randn(batch, length, HIDDEN).requires_grad_()
        mine = module.in_layout.shard(x.detach().flatten(0, 1), mesh.rank).clone().requires_grad_()
        found = []
        for each, given in ((dense, x), (module, mine)):
            torch.manual_seed(3)
            y = each(given) if each is dense else each(given, length)
            again = each(given) if each is dense else each(given, length)
            assert not torch.equal(y, again), "drawn anew"
            y.square().sum().backward()
            found.append(y.detach())
        close(found[1], module.out_layout.shard(found[0].flatten(0, 1), mesh.rank), f"{where}: y")
        close(mine.grad, module.in_layout.shard(x.grad.flatten(0, 1), mesh.rank), f"{where}: dx")
        dense.eval(), module.eval()
        shard = module.out_layout.shard(dense(x).flatten(0, 1), mesh.rank)
        close(module(mine, length), shard, f"{where}: eval")
        assert module.to_dense().dropout == 0.4


def test_dropout_has_the_mask_of_the_dense_twin(ranks):
    check_dropout([({"x": 1}, "1d", 2, 6)])
    two = [({"x": 2}, "1d", 2, 6), ({"dp": 2}, "3d", 2, 6)]
    ranks(2).run(check_dropout, two)
    four = [({"x": 2, "y": 2}, "2d", 2, 6), ({"x": 2, "y": 2}, "2d", 1, 12), ({"x": 1, "y": 4}, "2d", 4, 4)]
    ranks(4).run(check_dropout, four)


@pytest.mark.parametrize("mesh", [{}, {"mesh": None}], ids=["dense", "grid"])
def test_heads_that_cannot_be_made_or_turned(mesh):
    """A head of an odd number of features is not rotated: it would come out longer, and its norm changed."""
    options = {key: mesh_of(Grid(x=1)) for key in mesh}
    kind = ndtp.nn.Attention if mesh else ndtp.nn.DenseAttention
    with pytest.raises(LayoutError, match="3 does not divide 16 features"):
        kind(HIDDEN, 3, **options)
    for rotary, features in ((ndtp.nn.Rotary(), 3), (ndtp.nn.Rotary(dims=3), 4), (ndtp.nn.Rotary(dims=6), 4)):
        with pytest.raises(LayoutError, match=f"Rotary: dims={rotary.dims or 3} of the {features} features of a head"):
            kind(HIDDEN, 4, head_dim=features, positions=rotary, **options)
        with pytest.raises(LayoutError, match="make no pairs to turn\n  fix: dims="):
            rotary(randn(2, 1, features), torch.arange(2))
    assert kind(HIDDEN, 4, head_dim=3, positions=ndtp.nn.Rotary(dims=2), **options).head_dim == 3


def test_how_much_is_dropped():
    """As often as asked, and what is left is scaled, so that the mean stays."""
    dense = ndtp.nn.DenseAttention(8, heads=2, dropout=0.25, causal=False)
    weights = torch.ones(4, 2, 16, 16)
    from ndtp.nn.attention_dense import dropped_at

    drop = dropped_at(dense.dropout, 0, 0, (4, 16, 2), torch.device("cpu"))
    dropped = drop(weights, first=0, begin=0)
    assert abs((dropped == 0).double().mean().item() - 0.25) < 0.03
    assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    part = drop(weights[1:3, :, 4:9], first=1, begin=4)
    assert_equal(part, dropped[1:3, :, 4:9], "a part of it")


class Fused(nn.Module):
    """What a dense model has: one layer for all three."""

    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(HIDDEN, 32).double(), nn.Linear(16, HIDDEN).double()


def check_fused():
    mesh = mesh_of(Grid(x=2, y=2))
    torch.manual_seed(0)
    model = Fused()
    for order in ("parts", "groups"):
        options = {"heads": 4, "kv_heads": 2, "bias": True, "fused": "qkv_proj", "fused_order": order}
        like = {"mesh": mesh, "scheme": "2d", "dtype": torch.float64}
        module = ndtp.nn.Attention(HIDDEN, **options, **like)
        module.load_state_dict(model.state_dict())
        layers = split_projections(model.qkv_proj, 4, 2, order)
        dense = ndtp.nn.DenseAttention.of(*layers, model.o_proj, 4, 2)
        x = randn(2, 6, HIDDEN)
        mine = module(module.in_layout.shard(x.flatten(0, 1), mesh.rank), 6)
        close(mine, module.out_layout.shard(dense(x).flatten(0, 1), mesh.rank), order)
        state = module.state_dict()
        assert list(state) == list(model.state_dict()), list(state)
        for key, value in model.state_dict().items():
            assert_equal(state[key].full_tensor(), value, f"{order}: {key}")
        assert state["qkv_proj.weight"].to_local().numel() == 32 * HIDDEN // 4, "a shard of it"
        other = ndtp.nn.Attention(HIDDEN, **options, **like)
        other.load_state_dict(state)
        assert_equal(other.k_proj.weight.full_tensor(), module.k_proj.weight.full_tensor(), order)
        twin = module.to_dense()
        assert list(twin.state_dict()) == list(model.state_dict())
        twin.load_state_dict(model.state_dict())
        assert_equal(twin(x), dense(x), order)
        wrong = {**model.state_dict(), "qkv_proj.weight": torch.zeros(33, HIDDEN)}
        with pytest.raises(RuntimeError, match="33 rows are not those of 4 heads"):
            module.load_state_dict(wrong)
        with pytest.raises(RuntimeError, match=r"q_proj\.weight"):
            module.load_state_dict({})
    with pytest.raises(ValueError, match="fused_order='rows'"):
        ndtp.nn.Attention(HIDDEN, 4, fused="qkv", fused_order="rows", mesh=mesh, scheme="2d")


def test_fused_keys(ranks):
    ranks(4).run(check_fused)
