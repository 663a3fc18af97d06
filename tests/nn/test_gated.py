"""GatedMLP against the dense gated block: every scheme, bytes, padding, compilers, and what it refuses."""

import pytest
import torch
from products import mesh_of
from test_linear import dense_linear, first_turn, grids, message_of, on_their_ranks
from test_mlp import check_ends, run_block
from torch.nn import functional as F

import ndtp
from ndtp import Grid
from ndtp.algebra.schemes import SCHEMES
from ndtp.planner.block_cost import Block, Grids, volume
from ndtp.testing import assert_equal, small_integers

HIDDEN, INNER, ROWS = 16, 32, 16
PARTS = ("gate", "up", "down")


def dense_layers(hidden=HIDDEN, inner=INNER, bias=False):
    sizes = ((hidden, inner), (hidden, inner), (inner, hidden))
    return [dense_linear(*size, bias, seed=3 + i) for i, size in enumerate(sizes)]


def dense(layers, x, activation):
    gate, up, down = layers
    return down(activation(gate(x)) * up(x))


def halves(turns):
    """Of what lies in turns: the gate's, and up's."""
    return turns[0::2], turns[1::2]


def check_block(grid, scheme, rows=ROWS, hidden=HIDDEN, inner=INNER, bias=False, **arguments):
    """Integers throughout, and relu: every sum is exact, whatever its order."""
    mesh, where = mesh_of(grid), f"{grid}, {scheme}, {arguments}"
    layers = dense_layers(hidden, inner, bias)
    block = ndtp.nn.GatedMLP.from_dense(*layers, "relu", mesh=mesh, scheme=scheme, **arguments)
    x, upstream, x_shard, y, moved = run_block(block, rows, hidden)
    expected = dense(layers, x, torch.relu)
    expected.backward(upstream)
    check_ends(block, x, x_shard, y, expected, where)
    for name, parameter in block.named_parameters():
        layer, kind = name.split(".")
        grad = parameter.grad.full_tensor() if mesh.device_mesh is not None else parameter.grad
        parts = zip(halves(grad), layers[:2], strict=True) if layer == "up" else [(grad, layers[2])]
        for got, dense_layer in parts:
            target = dense_layer.get_parameter(kind).grad
            assert_equal(got[tuple(slice(0, size) for size in target.shape)], target, f"{where}: d{name}")
            assert got.abs().sum() == target.abs().sum(), f"{where}: padding of {name} has a gradient"
    assert moved == block.volume(rows), where
    whole = block.to_dense()
    assert_equal(whole(x), expected, f"{where}: to_dense")
    for part, layer in zip(PARTS, layers, strict=True):
        assert_equal(whole.get_submodule(part).weight, layer.weight, f"{where}: {part}")
    assert not mesh.collectives.in_flight, "handles left over"


def check_blocks(cases):
    for grid, scheme, arguments in cases:
        check_block(grid, scheme, **arguments)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_dense_on_every_grid(ranks, scheme):
    """Every other one of a scheme, the others in the next; what a block without a gate does on all: test_mlp.py."""
    cases = []
    for turn, grid in enumerate(grids(scheme, first_turn(scheme) % 2)[first_turn(scheme) % 2 :: 2], first_turn(scheme)):
        bias, regather, chunks = [(True, (), 1), (False, ("a", "b"), 2)][turn % 2]
        cases.append((grid, scheme, {"bias": bias, "regather": regather, "chunks": chunks}))
    on_their_ranks(ranks, check_blocks, cases)


def test_padding_of_features_and_rows(ranks):
    sizes = {"hidden": 13, "inner": 27}
    cases = [
        (Grid(z=2, x=2, y=2), "3d", {**sizes, "pad": True, "rows": 12}),
        (Grid(x=2, y=4), "2d-features", {**sizes, "pad": True, "bias": True}),
        (Grid(x=8), "1d-sp", {**sizes, "pad": 16}),
    ]
    ranks(8).run(check_blocks, cases)


def check_planned(grid):
    """The planner's volume of a gated block is what this one moves."""
    mesh = mesh_of(grid)
    block = ndtp.nn.GatedMLP(HIDDEN, INNER, mesh=mesh, scheme="3d")
    sizes = {axis: grid[axis] if axis in grid else 1 for axis in ("dp", "z", "x", "y")}
    assert block.volume(ROWS).elements == volume(Block.mlp(ROWS, HIDDEN, INNER, gated=True), Grids(**sizes))


def check_real(grid, scheme, turn):
    """Every activation; what is gathered again and chunks take turns over activations and grids."""
    mesh = mesh_of(grid)
    layers = [layer.double() for layer in dense_layers()]
    for activation, function in (("silu", F.silu), ("gelu", F.gelu), ("sigmoid", torch.sigmoid)):
        regather, chunks = (((), 1), (("a", "b"), 2))[turn % 2]
        turn += 1
        block = ndtp.nn.GatedMLP.from_dense(
            *layers, activation, mesh=mesh, scheme=scheme, regather=regather, chunks=chunks
        )
        x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
        mine = block.in_layout.shard(x.detach(), mesh.rank).clone().requires_grad_()
        y, expected = block(mine), dense(layers, x, function)
        torch.testing.assert_close(y, block.out_layout.shard(expected, mesh.rank))
        expected.backward(torch.ones_like(expected))
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(mine.grad, block.in_layout.shard(x.grad, mesh.rank))


def test_real_activations_and_the_planned_volume(ranks):
    for grid in (Grid(z=2, x=2, y=2), Grid(dp=2, z=2, x=1, y=1), Grid(dp=2)):
        ranks(grid.num_ranks).run(check_planned, grid)
    real = ((Grid(z=2, x=2, y=2), "3d"), (Grid(x=4), "1d-sp"), (Grid(x=2, y=2), "2d-features"))
    for turn, (grid, scheme) in enumerate(real):
        ranks(grid.num_ranks).run(check_real, grid, scheme, turn)


def test_as_many_chunks_as_pay(ranks):
    ranks(4).run(
        check_blocks, [(Grid(z=2, x=1, y=2), "3d", {"chunks": "auto"}), (Grid(x=4), "1d-sp", {"chunks": "auto"})]
    )


def check_compiled():
    import torch._dynamo

    torch._dynamo.reset()
    mesh = mesh_of(Grid(z=2, x=1, y=1))
    block = ndtp.nn.GatedMLP.from_dense(*dense_layers(), "relu", mesh=mesh, chunks=2)
    step = torch.compile(block, backend="aot_eager", fullgraph=True)
    results = []
    for run in (block, step):
        block.zero_grad()
        x = block.in_layout.shard(small_integers((ROWS, HIDDEN), 5), mesh.rank).clone().requires_grad_()
        y = run(x)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, *(p.grad.to_local() for p in block.parameters())])
    for one, other in zip(*results, strict=True):
        assert_equal(other, one, "compiled")


def test_compiles_as_one_op(ranks):
    ranks(2).run(check_compiled)


def check_dropout_and_training():
    """A mask is the same on every grid, and so are losses."""
    losses = []
    for grid in (Grid(z=2, x=2, y=1), Grid(x=4, y=1, z=1)):
        mesh = mesh_of(grid)
        block = ndtp.nn.GatedMLP(HIDDEN, INNER, mesh=mesh, dropout=0.25, seed=1, dtype=torch.float64)
        optimizer = torch.optim.SGD(block.parameters(), 1e-3)
        x = block.in_layout.shard(small_integers((ROWS, HIDDEN), 5, torch.float64), mesh.rank).clone()
        torch.manual_seed(3)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = block(x).square().sum()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            found.append(total.item())
        losses.append(found)
    torch.testing.assert_close(losses[0], losses[1])
    assert losses[0][2] < losses[0][0]


def test_dropout_and_training(ranks):
    ranks(4).run(check_dropout_and_training)


def check_state(folder):
    """The dense pair goes out and comes in, whole, as shards, and by a checkpoint to another grid."""
    import torch.distributed.checkpoint as dcp

    layers = dense_layers(inner=30, bias=True)
    whole = {
        f"{part}.{name}": p for part, layer in zip(PARTS, layers, strict=True) for name, p in layer.named_parameters()
    }
    for grid, scheme in ((Grid(z=2, x=2, y=1), "3d"), (Grid(x=4), "1d-sp"), (Grid(x=2, y=2), "2d-features")):
        mesh = mesh_of(grid)
        block, fresh = (ndtp.nn.GatedMLP(HIDDEN, 30, mesh=mesh, scheme=scheme, bias=True, pad=True) for _ in range(2))
        assert not any(block.load_state_dict(whole)), "the dense pair"
        for part, layer in zip(PARTS, layers, strict=True):
            assert_equal(block.to_dense().get_submodule(part).weight, layer.weight, f"{grid}: {part}")
        state = block.state_dict()
        assert list(state) == list(whole), "keys, in the order of the dense model"
        for name, value in state.items():
            real = tuple(slice(0, size) for size in whole[name].shape)
            assert_equal(value.full_tensor()[real], whole[name], f"{grid}: {name}")
            assert float(value.norm()) == pytest.approx(float(whole[name].norm())), f"{grid}: {name} by all ranks"
        fresh.load_state_dict(state, assign=True)
        assert fresh.up.weight.to_local().data_ptr() == block.up.weight.to_local().data_ptr(), "assign shares memory"
        fresh = ndtp.nn.GatedMLP(HIDDEN, 30, mesh=mesh, scheme=scheme, bias=True, pad=True)
        state = block.state_dict()  # torch notes "assign" in the one that was loaded so
        fresh.load_state_dict(state)
        assert_equal(fresh.up.weight.full_tensor(), block.up.weight.full_tensor(), "shards")
        with torch.no_grad():
            state["gate.weight"].zero_()
        assert not block.to_dense().gate.weight.any(), "a view of the same memory"
        fused = {**whole, "up.weight": fresh.up.weight.full_tensor(), "up.bias": fresh.up.bias.full_tensor()}
        del fused["gate.weight"], fused["gate.bias"]
        assert not any(block.load_state_dict(fused)), "what was saved as one"
        assert_equal(block.to_dense().gate.weight, layers[0].weight, "what was saved as one")
        partial = {name: value for name, value in whole.items() if name != "gate.weight"}
        assert "gate.weight" in block.load_state_dict(partial, strict=False).missing_keys
    rows_of_one = [ndtp.nn.GatedMLP(HIDDEN, 4, mesh=mesh_of(Grid(x=4)), scheme="1d", seed=seed) for seed in range(2)]
    rows_of_one[1].load_state_dict(rows_of_one[0].state_dict(), assign=True)
    stored = {block.up.weight.to_local().data_ptr() for block in rows_of_one}
    assert len(stored) == 1, "assign shares memory where a rank has one row of each, whose stride says nothing"
    saved, loaded = (
        ndtp.nn.GatedMLP(HIDDEN, INNER, mesh=mesh_of(grid), scheme=scheme, seed=i)
        for i, (grid, scheme) in enumerate(((Grid(z=2, x=2, y=1), "3d"), (Grid(x=2, y=2), "2d")))
    )
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    assert_equal(loaded.to_dense().gate.weight, saved.to_dense().gate.weight, "in place, through the views")
    loaded.load_state_dict(state)
    for part in PARTS:
        one, other = (block.to_dense().get_submodule(part).weight for block in (saved, loaded))
        assert_equal(one, other, f"checkpoint: {part}")


def test_the_state_dict_is_that_of_the_dense_pair(ranks, tmp_path):
    ranks(4).run(check_state, str(tmp_path / "checkpoint"))
    block = ndtp.nn.GatedMLP(4, 8, mesh=ndtp.ProcessGrid(Grid(x=1)))
    assert list(block.state_dict()) == [f"{part}.weight" for part in PARTS]


def test_what_it_refuses():
    mesh = ndtp.ProcessGrid(Grid(x=1))
    gate, up, down = dense_layers()
    with_bias = dense_layers(bias=True)
    frozen = dense_linear(HIDDEN, INNER, False).requires_grad_(False)
    make = ndtp.nn.GatedMLP.from_dense
    messages = [
        message_of(lambda: make(gate, down, up, mesh=mesh)),
        message_of(lambda: make(with_bias[0], up, down, mesh=mesh)),
        message_of(lambda: make(frozen, up, down, mesh=mesh)),
        message_of(lambda: ndtp.nn.MLP.from_dense(up, down, "swiglu", mesh=mesh)),
    ]
    words = [
        "gate and up lead",
        "of their bias is True and None",
        "of their weight is False and True",
        "takes 2 features",
    ]
    for message, word in zip(messages, words, strict=True):
        assert word in message, message
    with pytest.raises(ValueError, match="'swiglu' of the gate is not one of silu, gelu"):
        ndtp.nn.GatedMLP(4, 8, "swiglu", mesh=mesh)
    odd = ndtp.nn.Linear(4, 5, mesh=mesh), ndtp.nn.Linear(5, 4, mesh=mesh, position="down")
    with pytest.raises(ndtp.LayoutError, match="5 columns, swiglu takes 2"):
        ndtp.ops.products.mlp(torch.ones(2, 4), [m.weight for m in odd], [m.plan for m in odd], mesh, "swiglu")
