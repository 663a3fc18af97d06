"""Linear on every grid and scheme: the dense layer's values, gradients, keys and shapes."""

import pytest
import torch
from products import mesh_of
from torch import nn as dense_nn

import ndtp
from ndtp import CommMeter, Grid, Layout, LayoutError
from ndtp.algebra.schemes import SCHEMES
from ndtp.testing import assert_equal, small_integers

IN, OUT, ROWS = 32, 64, 16


def dense_linear(inp=IN, out=OUT, bias=True, dtype=torch.float32, seed=0):
    layer = dense_nn.Linear(inp, out, bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(small_integers((out, inp), seed, low=-1, high=1))
        if bias:
            layer.bias.copy_(small_integers((out,), seed + 1))
    return layer


def grids(scheme, turn=0):
    """All grids of four ranks, data parallelism, and what it takes eight for: three axes, and two of unequal sizes.

    Of the last every other one in either turn; two in all where a scheme takes its axes as one.
    """
    plane = scheme.startswith("2d")
    four, eight = ([grid for grid in Grid.all(n) if grid["z"] == 1 or not plane] for n in (4, 8))
    unequal = [grid for grid in eight if sorted(grid.shape) == [1, 2, 4]]
    more = [Grid(dp=2, x=2, y=2)] if plane else [Grid(dp=2, x=2), Grid(z=2, x=2, y=2)]
    return [*four, *unequal[turn :: 5 if scheme.startswith("1d") else 2][:3], *more]


def on_their_ranks(ranks, check, cases, **arguments):
    """The grid comes first in a case."""
    for num_ranks in sorted({case[0].num_ranks for case in cases}):
        ranks(num_ranks).run(check, [case for case in cases if case[0].num_ranks == num_ranks], **arguments)


def first_turn(scheme):
    """Grids of a scheme take turns at what is varied; a grid has another turn in the next scheme."""
    return list(SCHEMES).index(scheme)


def padded_shard(tensor, layout, mesh, features):
    """The shard of a tensor that is padded with zero columns first."""
    return layout.shard(dense_nn.functional.pad(tensor, (0, features - tensor.shape[-1])), mesh.rank)


def check_linear(cases, inp=IN, out=OUT, rows=ROWS, pad=False, dtype=torch.float32):
    for grid, scheme, position, bias in cases:
        mesh, where = mesh_of(grid), f"{grid}, {scheme}, {position}, bias={bias}"
        reference = dense_linear(inp, out, bias, dtype)
        layer = ndtp.nn.Linear.from_dense(reference, mesh=mesh, scheme=scheme, position=position, pad=pad)
        x = small_integers((rows, inp), 5, dtype, low=-1, high=1).requires_grad_()
        upstream = small_integers((rows, out), 6, dtype, low=-1, high=1)
        x_shard = padded_shard(x.detach(), layer.in_layout, mesh, layer.padded_in).clone().requires_grad_()
        with CommMeter() as meter:
            y = layer(x_shard)
            y.backward(padded_shard(upstream, layer.out_layout, mesh, layer.padded_out))
        expected = reference(x)
        expected.backward(upstream)
        assert_equal(y, padded_shard(expected, layer.out_layout, mesh, layer.padded_out), f"{where}: y")
        assert_equal(x_shard.grad, padded_shard(x.grad, layer.in_layout, mesh, layer.padded_in), f"{where}: dx")
        for name, parameter in layer.named_parameters():
            grad = parameter.grad.full_tensor() if mesh.device_mesh is not None else parameter.grad
            target = reference.get_parameter(name).grad
            real = tuple(slice(0, size) for size in target.shape)
            assert_equal(grad[real], target, f"{where}: d{name}")
            assert grad.abs().sum() == target.abs().sum(), f"{where}: padding of {name} has a gradient"
        volume = layer.volume(rows)
        assert meter.volume == volume, f"{where}: measured {meter.volume}, predicted {volume}"
        back = layer.to_dense()
        assert_equal(back.weight, reference.weight, f"{where}: to_dense")
        assert back.bias is None if not bias else torch.equal(back.bias, reference.bias), f"{where}: to_dense bias"
        state = layer.state_dict()
        assert list(state) == list(reference.state_dict()), f"{where}: keys"
        if not pad:
            assert [t.shape for t in state.values()] == [t.shape for t in reference.state_dict().values()], where
        assert not mesh.collectives.in_flight, "handles left over"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_dense_on_every_grid(ranks, scheme):
    """In both positions: one with a bias and one without, by turns."""
    cases = [
        (grid, scheme, position, bool((turn + index) % 2))
        for turn, grid in enumerate(grids(scheme), first_turn(scheme))
        for index, position in enumerate(("up", "down"))
    ]
    on_their_ranks(ranks, check_linear, cases)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_is_exact_and_gets_no_gradient(ranks, scheme):
    """On every other grid of a scheme; the others: test_mlp.py."""
    turns = enumerate(grids(scheme)[::2], first_turn(scheme))
    cases = [(grid, scheme, ("up", "down")[turn % 2], True) for turn, grid in turns]
    on_their_ranks(ranks, check_linear, cases, inp=13, out=27, pad=True)
    on_their_ranks(ranks, check_linear, cases[:2], inp=1, out=3, pad=True)


def test_low_precision_and_few_ranks(ranks):
    cases = [(Grid(x=2), "1d", "down", True), (Grid(z=2, x=1, y=1), "3d", "up", True)]
    ranks(2).run(check_linear, cases, dtype=torch.bfloat16)
    check_linear([(Grid(x=1), "1d", "up", True), (Grid(z=1, x=1, y=1), "3d", "down", False)])


# ---- initialisation ----


def initial_values(grid, scheme, **arguments):
    mesh = mesh_of(grid)
    layers = [
        ndtp.nn.Linear(IN, OUT, mesh=mesh, scheme=scheme, position=position, **arguments) for position in ("up", "down")
    ]
    return [(dense.weight, dense.bias) for dense in (layer.to_dense() for layer in layers)]


def test_the_same_seed_gives_the_same_global_weights_on_every_grid(ranks):
    torch.manual_seed(0)  # as the pool does
    for arguments in ({}, {"seed": 11}, {"dtype": torch.bfloat16}, {"pad": True}):
        torch.manual_seed(0)
        expected = initial_values(Grid(x=1), "1d", **arguments)
        bound = IN**-0.5
        for weight, bias in expected:
            assert weight.abs().max() <= bound and bias.abs().max() <= bound
            assert weight.detach().float().std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        for grid, scheme in [(Grid(x=8), "1d"), (Grid(z=2, x=2, y=2), "3d"), (Grid(dp=2, x=4), "1d-sp")]:
            for values in ranks(8).run(initial_values, grid, scheme, **arguments):
                for (weight, bias), (dense_weight, dense_bias) in zip(values, expected, strict=True):
                    assert_equal(weight, dense_weight)
                    assert_equal(bias, dense_bias)
    assert not torch.equal(expected[0][0], expected[1][0]), "two layers draw different values"


def check_meta_and_dtype(grid):
    mesh = mesh_of(grid)
    layer = ndtp.nn.Linear(IN, OUT, mesh=mesh, device="meta", dtype=torch.float64, seed=4)
    assert layer.weight.is_meta and layer.weight.shape == (OUT, IN) and layer.weight.dtype == torch.float64
    layer.to_empty(device=torch.get_default_device().type).reset_parameters()
    made = ndtp.nn.Linear(IN, OUT, mesh=mesh, dtype=torch.float64, seed=4)
    for one, other in zip(layer.parameters(), made.parameters(), strict=True):
        assert_equal(ndtp.ops.products.local_shard(one), ndtp.ops.products.local_shard(other), "meta, then to_empty")
    made.reset_parameters(seed=5)
    assert not torch.equal(ndtp.ops.products.local_shard(layer.weight), ndtp.ops.products.local_shard(made.weight)), (
        "another seed"
    )
    assert layer.bfloat16().weight.dtype == torch.bfloat16
    y = layer(torch.ones(layer.in_layout.shard_shape((ROWS, IN)), dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and y.shape == layer.out_layout.shard_shape((ROWS, OUT))


def test_meta_device_and_dtype(ranks):
    check_meta_and_dtype(Grid(x=1))
    ranks(8).run(check_meta_and_dtype, Grid(z=2, x=2, y=2))


# ---- use ----


def check_leading_dims(grid):
    mesh = mesh_of(grid)
    reference = dense_linear()
    layer = ndtp.nn.Linear.from_dense(reference, mesh=mesh)
    x = small_integers((8, 3, 2, IN), 1)
    layout = layer.in_layout
    shard = Layout(grid, layout.dims[0], None, None, layout.dims[1]).shard(x, mesh.rank)
    out = Layout(grid, layer.out_layout.dims[0], None, None, layer.out_layout.dims[1])
    assert_equal(layer(shard), out.shard(reference(x), mesh.rank), "extra leading dims")
    assert layer(shard[:, :0]).shape == (*shard[:, :0].shape[:-1], OUT // grid.size(out.dims[-1])), "no rows"
    layer.weight.requires_grad_(False)
    assert layer(shard).requires_grad, "the bias still wants one"
    frozen = ndtp.nn.Linear.from_dense(reference.requires_grad_(False), mesh=mesh)
    assert not any(p.requires_grad for p in frozen.parameters()), "from_dense keeps frozen"
    assert not any(p.requires_grad for p in frozen.to_dense().parameters()), "to_dense keeps frozen"


def check_blocks_of_rows():
    """Rows over z come back over (z x): half as many, which are half a block."""
    mesh = mesh_of(Grid(z=4, x=2, y=1))
    layer = ndtp.nn.Linear(IN, OUT, mesh=mesh)
    with pytest.raises(LayoutError, match=r"3 rows of the result do not make whole blocks of \(3, 2\)"):
        layer(torch.ones(1, 3, 2, IN // 2))


def test_leading_dims_and_frozen(ranks):
    ranks(8).run(check_blocks_of_rows)
    ranks(8).run(check_leading_dims, Grid(z=2, x=2, y=2))
    ranks(8).run(check_leading_dims, Grid(z=4, x=1, y=2))


def message_of(call):
    try:
        call()
    except LayoutError as error:
        return str(error)
    raise AssertionError("no error")


def check_errors():
    mesh = mesh_of(Grid(z=2, x=2, y=2))
    Linear = ndtp.nn.Linear
    layout = Layout(mesh.grid, "x", "y")
    return {
        "divide": message_of(lambda: Linear(10, 7, mesh=mesh)),
        "scheme": message_of(lambda: Linear(8, 8, mesh=mesh, scheme="4d")),
        "2d": message_of(lambda: Linear(8, 8, mesh=mesh, scheme="2d")),
        "position": message_of(lambda: Linear(8, 8, mesh=mesh, position="left")),
        "half": message_of(lambda: Linear(8, 8, mesh=mesh, in_layout=layout)),
        "sizes": message_of(lambda: Linear(8, 8, mesh=mesh).load_dense(dense_nn.Linear(8, 16))),
        "bias": message_of(lambda: Linear(8, 8, mesh=mesh).load_dense(dense_nn.Linear(8, 8, bias=False))),
        # The weight wants z after x, the mesh of the grid has it so; the opposite order has no DTensor.
        "order": message_of(
            lambda: Linear(
                8, 8, mesh=mesh, in_layout=Layout(mesh.grid, None, None),
                weight_layout=Layout(mesh.grid, None, ("z", "x")),
            )
        ),
    }  # fmt: skip


def test_errors_are_the_same_on_every_rank(ranks):
    messages = ranks(8).run(check_errors)
    assert all(message == messages[0] for message in messages)
    assert "pad=True" in messages[0]["divide"] and "3d" in messages[0]["scheme"] and "z=2" in messages[0]["2d"]
    assert "(8, 16, True)" in messages[0]["sizes"] and "fix" in messages[0]["order"]


def test_a_vector_is_refused():
    mesh = ndtp.ProcessGrid(Grid(x=1))
    for layer in (ndtp.nn.Linear(4, 8, mesh=mesh), ndtp.nn.MLP(4, 8, mesh=mesh)):
        with pytest.raises(LayoutError, match="whose rows a grid splits"):
            layer(torch.ones(4))
