"""MLP on every grid and scheme against the dense pair; training, clipping and checkpoints of a residual stack."""

import copy
import itertools

import pytest
import torch
from products import mesh_of
from test_linear import dense_linear, first_turn, grids, message_of, on_their_ranks, padded_shard
from torch import nn as dense_nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import CommMeter, Grid, Layout
from ndtp.algebra.schemes import SCHEMES, BlockLayouts
from ndtp.ops.products import local_shard
from ndtp.testing import assert_equal, small_integers

HIDDEN, INNER, ROWS = 16, 32, 16


def dense_block(hidden=HIDDEN, inner=INNER, bias=True):
    return dense_linear(hidden, inner, bias), dense_linear(inner, hidden, bias, seed=2)


def shift(x):
    """Not zero at zero: padding would show."""
    return x + 1


def run_block(block, rows, hidden):
    """A step on shards of integers: whole input and upstream gradient, the shards in and out, what was moved."""
    mesh, width = block.mesh, block.up.padded_in
    x = small_integers((rows, hidden), 5, low=-1, high=1).requires_grad_()
    upstream = small_integers((rows, hidden), 6, low=-1, high=1)
    x_shard = padded_shard(x.detach(), block.in_layout, mesh, width).clone().requires_grad_()
    with CommMeter() as meter:
        y = block(x_shard)
        y.backward(padded_shard(upstream, block.out_layout, mesh, width))
    return x, upstream, x_shard, y, meter.volume


def check_ends(block, x, x_shard, y, expected, where):
    """The output and the gradient of the input are the shards of the dense ones."""
    width = block.up.padded_in
    assert_equal(y, padded_shard(expected, block.out_layout, block.mesh, width), f"{where}: y")
    assert_equal(x_shard.grad, padded_shard(x.grad, block.in_layout, block.mesh, width), f"{where}: dx")


def check_block(grid, scheme, activation, rows=ROWS, hidden=HIDDEN, inner=INNER, **arguments):
    """Integers throughout: relu and a shift keep every sum exact."""
    mesh, where = mesh_of(grid), f"{grid}, {scheme}, {arguments}"
    up, down = dense_block(hidden, inner, arguments.pop("bias", True))
    block = ndtp.nn.MLP.from_dense(up, down, activation, mesh=mesh, scheme=scheme, **arguments)
    function = block.activation
    x, upstream, x_shard, y, moved = run_block(block, rows, hidden)
    expected = down(function(up(x)))
    expected.backward(upstream)
    check_ends(block, x, x_shard, y, expected, where)
    for name, parameter in block.named_parameters():
        target = {"up": up, "down": down}[name.split(".")[0]].get_parameter(name.split(".")[1]).grad
        grad = parameter.grad.full_tensor() if mesh.device_mesh is not None else parameter.grad
        assert_equal(grad[tuple(slice(0, size) for size in target.shape)], target, f"{where}: d{name}")
        assert grad.abs().sum() == target.abs().sum(), f"{where}: padding of {name} has a gradient"
    assert moved == block.volume(rows), f"{where}: {moved} != {block.volume(rows)}"
    dense = block.to_dense()
    assert_equal(dense(x), expected, f"{where}: to_dense")
    assert list(block.state_dict()) == list(dense.state_dict()), f"{where}: keys"
    assert not mesh.collectives.in_flight, "handles left over"


def check_blocks(cases):
    for grid, scheme, arguments in cases:
        check_block(grid, scheme, arguments.pop("activation", "relu"), **arguments)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_dense_on_every_grid(ranks, scheme):
    """With and without biases and what is gathered again by turns: each on every other grid of a scheme."""
    cases = []
    for turn, grid in enumerate(grids(scheme, 1), first_turn(scheme)):
        bias, regather, activation = [(True, (), "squared_relu"), (False, ("a", "b"), "relu")][turn % 2]
        cases.append((grid, scheme, {"bias": bias, "regather": regather, "activation": activation}))
    on_their_ranks(ranks, check_blocks, cases)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_of_features_and_rows(ranks, scheme):
    """13 features, 27 inside, and so few rows a shard that they do not divide inside of the block: by turns.

    On every other grid of a scheme; a Linear is padded on the others: test_linear.py.
    """
    cases = []
    for turn, grid in enumerate(grids(scheme)[1::2], first_turn(scheme)):
        splits = ndtp.algebra.schemes.block_layouts(grid, scheme).input.num_splits(0)
        rows, pad = [(splits, True), (3 * splits, True), (2 * ROWS, 16)][turn % 3]
        cases.append((grid, scheme, {"hidden": 13, "inner": 27, "pad": pad, "rows": rows, "activation": shift}))
    on_their_ranks(ranks, check_blocks, cases)


def test_few_ranks(ranks):
    """On four: all grids above."""
    check_block(Grid(x=1), "1d", "relu")
    check_block(Grid(z=1, x=1, y=1), "3d", "relu", hidden=13, inner=27, pad=True)
    ranks(2).run(check_blocks, [(g, "3d", {}) for g in Grid.all(2)] + [(Grid(x=2), "1d", {})])


def check_explicit_layouts():
    """Rows over y all the way: the block of a user's own making."""
    grid = Grid(x=2, y=4)
    lay = lambda *dims: Layout(grid, *dims)  # noqa: E731
    layouts = BlockLayouts(lay("y", None), lay("x", None), lay("y", "x"), lay(None, "x"), lay("y", None))
    check_block(grid, None, "relu", layouts=layouts)
    # An input whose rows are split otherwise than the output's.
    layouts = BlockLayouts(lay(("y", "x"), None), lay("x", None), lay("y", "x"), lay(None, "x"), lay("y", None))
    check_block(grid, None, "relu", layouts=layouts)


def test_explicit_layouts(ranks):
    ranks(8).run(check_explicit_layouts)


# ---- dropout, leading dims, copies ----


def dropout_results(grid, scheme, p, hidden=HIDDEN, inner=INNER, pad=False, rows=ROWS):
    """The dense output and weight gradients under dropout, each assembled on every rank."""
    mesh = mesh_of(grid)
    up, down = dense_block(hidden, inner)
    block = ndtp.nn.MLP.from_dense(up, down, "relu", mesh=mesh, scheme=scheme, dropout=p, pad=pad)
    x = small_integers((rows, hidden), 5, low=-1, high=1)
    shard = padded_shard(x, block.in_layout, mesh, block.up.padded_in).clone()
    results = []
    for use_checkpoint in (False, True):
        torch.manual_seed(7)
        block.zero_grad()
        y = checkpoint(block, shard, use_reentrant=False) if use_checkpoint else block(shard)
        y.backward(torch.ones_like(y))
        grads = [p.grad.full_tensor() if mesh.device_mesh is not None else p.grad for p in block.parameters()]
        real = [g[tuple(slice(0, s) for s in size)] for g, size in zip(grads, real_sizes(hidden, inner), strict=True)]
        whole = ndtp.relayout(y.detach(), block.out_layout, block.out_layout.with_dims(None, None), mesh)
        results.append([whole[:, :hidden], *real])
    for once, again in zip(*results, strict=True):
        assert_equal(again, once, "checkpoint draws the same mask")
    return results[0]


def real_sizes(hidden, inner):
    return (inner, hidden), (inner,), (hidden, inner), (hidden,)


def test_dropout_is_the_same_on_every_grid(ranks):
    expected = dropout_results(Grid(x=1), "1d", 0.5)
    without = dropout_results(Grid(x=1), "1d", 0.0)
    assert not torch.equal(expected[0], without[0])
    for grid, scheme in [(Grid(x=8), "1d"), (Grid(x=4), "1d-sp"), (Grid(x=2, y=4), "2d-features")] + [
        (grid, "3d") for grid in (Grid(z=4, x=1, y=1), Grid(z=2, x=1, y=4), Grid(z=2, x=2, y=2))
    ]:
        for results in ranks(grid.num_ranks).run(dropout_results, grid, scheme, 0.5):
            for result, target in zip(results, expected, strict=True):
                assert_equal(result, target, f"{grid}, {scheme}")


def test_dropout_under_padding_is_the_same_on_every_grid(ranks):
    sizes = {"hidden": 13, "inner": 27, "pad": True, "rows": 8}
    expected = dropout_results(Grid(x=1), "1d", 0.5, **sizes)
    for grid, scheme in [(Grid(x=4), "1d"), (Grid(z=2, x=2, y=2), "3d"), (Grid(z=1, x=4, y=1), "3d")]:
        for results in ranks(grid.num_ranks).run(dropout_results, grid, scheme, 0.5, **sizes):
            for result, target in zip(results, expected, strict=True):
                assert_equal(result, target, f"{grid}, {scheme}")


def check_use():
    mesh = mesh_of(Grid(z=2, x=2, y=2))
    up, down = dense_block()
    block = ndtp.nn.MLP.from_dense(up, down, "relu", mesh=mesh)
    x = small_integers((8, 3, 2, HIDDEN), 1)
    layout = Layout(mesh.grid, block.in_layout.dims[0], None, None, block.in_layout.dims[1])
    y = block(layout.shard(x, mesh.rank))
    assert_equal(y, layout.shard(down(F.relu(up(x))), mesh.rank), "extra leading dims")
    assert block(layout.shard(x[:0], mesh.rank)).shape == (0, 3, 2, HIDDEN // 2), "no rows"
    assert block(layout.shard(x[:, :0], mesh.rank)).shape == (2, 0, 2, HIDDEN // 2), "no rows"
    twin = copy.deepcopy(block)
    with torch.no_grad():
        local_shard(twin.up.weight).zero_()
    assert not torch.equal(local_shard(block.up.weight), local_shard(twin.up.weight)), "a copy has its own weights"
    assert_equal(block(layout.shard(x, mesh.rank)), y, "the original is as it was")
    meta = ndtp.nn.MLP(HIDDEN, INNER, mesh=mesh, device="meta", seed=3)
    meta.to_empty(device="cpu").reset_parameters()
    for one, other in zip(meta.parameters(), ndtp.nn.MLP(HIDDEN, INNER, mesh=mesh, seed=3).parameters(), strict=True):
        assert_equal(local_shard(one), local_shard(other), "meta, then to_empty")
    frozen = ndtp.nn.MLP.from_dense(up, down, mesh=mesh)
    frozen.up.requires_grad_(False)
    shard = layout.shard(x, mesh.rank).flatten(0, 2)
    with CommMeter() as meter:
        frozen(shard).sum().backward()
    assert meter.volume == frozen.volume(48, dgrad=False), "a frozen layer costs forward only"
    messages = [
        message_of(lambda: ndtp.nn.MLP(10, 32, mesh=mesh)),
        message_of(lambda: ndtp.nn.MLP.from_dense(up, up, mesh=mesh)),
        message_of(lambda: block(torch.ones(3, HIDDEN // 2 + 1))),
    ]
    return messages


def test_use_and_errors(ranks):
    messages = ranks(8).run(check_use)
    assert all(m == messages[0] for m in messages)
    assert "'mlp.up'" in messages[0][0] and "fix" in messages[0][1]
    with pytest.raises(ValueError, match="not one of"):
        ndtp.nn.MLP(4, 4, "swish9", mesh=mesh_of(Grid(x=1)))


# ---- training ----


class Stack(dense_nn.Module):
    """Residual blocks of anything that maps [rows, hidden] to itself."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = dense_nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def dense_stack(blocks=2):
    torch.manual_seed(1)
    return Stack(
        dense_nn.Sequential(dense_nn.Linear(HIDDEN, INNER), dense_nn.GELU(), dense_nn.Linear(INNER, HIDDEN)).double()
        for _ in range(blocks)
    )


def train(model, x, target, steps, optimizer, clips=(None,), splits=1, total=lambda loss: loss):
    """Clips by turns."""
    losses, norms = [], []
    for clip in itertools.islice(itertools.cycle(clips), steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target) / splits
        loss.backward()
        if clip is not None:
            norm = clip(model.parameters(), 0.05)
            norms.append(norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())
        optimizer.step()
        losses.append(total(loss.detach()).item())
    return losses, norms


def rows_and_targets():
    generator = torch.Generator().manual_seed(4)
    return (torch.randn(2 * ROWS, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))


def parallel_stack(grid, scheme):
    mesh = mesh_of(grid)
    blocks = [
        ndtp.nn.MLP.from_dense(block[0], block[2], "gelu", mesh=mesh, scheme=scheme, name=f"block{i}")
        for i, block in enumerate(dense_stack().blocks)
    ]
    return mesh, Stack(blocks)


CLIP = torch.nn.utils.clip_grad_norm_


def adamw(model):
    """In one operation for all parameters: DTensor looks for a way for each operation, which takes longer than a step.

    The other forms of AdamW: models/test_composition.py.
    """
    return torch.optim.AdamW(model.parameters(), 1e-2, fused=True)


def training_case(grid, scheme):
    mesh, model = parallel_stack(grid, scheme)
    layout = model.blocks[0].in_layout
    x, target = (layout.shard(t, mesh.rank) for t in rows_and_targets())
    splits = layout.num_splits(0) * layout.num_splits(1)

    def total(loss):
        """Every distinct part once: sum over all ranks, divided by the number of replicas."""
        torch.distributed.all_reduce(loss)
        return loss / (grid.num_ranks / splits)

    optimizer = adamw(model)
    return train(model, x, target, 9, optimizer, (None, CLIP, ndtp.nn.clip_grad_norm_), splits, total)


TRAINING = [
    (Grid(x=4), "1d"),
    (Grid(dp=2, x=2), "1d-sp"),
    (Grid(x=2, y=2), "2d"),
    (Grid(x=2, y=2), "2d-features"),
    (Grid(z=2, x=2, y=2), "3d"),
]


def test_adamw_steps_give_the_dense_losses(ranks):
    """Unclipped, clipped by torch's function and by ndtp's: in turns, so that each goes on from what the last left."""
    x, target = rows_and_targets()
    model = dense_stack()
    optimizer = adamw(model)
    expected = train(model, x, target, 9, optimizer, (None, CLIP, CLIP))
    assert expected[0][-1] < expected[0][0] and all(norm > 0.05 for norm in expected[1])
    for grid, scheme in TRAINING:
        for losses, norms in ranks(grid.num_ranks).run(training_case, grid, scheme):
            assert losses == pytest.approx(expected[0], rel=1e-9), (grid, scheme)
            assert norms == pytest.approx(expected[1], rel=1e-9) and len(norms) == 6, (grid, scheme)


def save_checkpoint(grid, scheme, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    mesh, model = parallel_stack(grid, scheme)
    optimizer = adamw(model)
    layout = model.blocks[0].in_layout
    x, target = (layout.shard(t, mesh.rank) for t in rows_and_targets())
    splits = layout.num_splits(0) * layout.num_splits(1)
    train(model, x, target, 3, optimizer, splits=splits)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    train(model, x, target, 3, optimizer, splits=splits)
    return [p.full_tensor().detach() for p in model.parameters()]


def load_checkpoint(grid, scheme, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh, model = parallel_stack(grid, scheme)
    optimizer = adamw(model)
    state, optimizer_state = get_state_dict(model, optimizer)
    both = {"model": state, "optimizer": optimizer_state}
    dcp.load(both, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    layout = model.blocks[0].in_layout
    x, target = (layout.shard(t, mesh.rank) for t in rows_and_targets())
    train(model, x, target, 3, optimizer, splits=layout.num_splits(0) * layout.num_splits(1))
    return [p.full_tensor().detach() for p in model.parameters()]


def test_a_checkpoint_of_one_grid_loads_on_another(ranks, tmp_path):
    saved = ranks(8).run(save_checkpoint, Grid(z=2, x=2, y=2), "3d", str(tmp_path / "checkpoint"))
    for num_ranks, grid, scheme in [(4, Grid(x=2, y=2), "2d"), (4, Grid(x=4), "1d")]:
        for parameters in ranks(num_ranks).run(load_checkpoint, grid, scheme, str(tmp_path / "checkpoint")):
            for parameter, target in zip(parameters, saved[0], strict=True):
                torch.testing.assert_close(parameter, target, rtol=1e-9, atol=1e-12)
