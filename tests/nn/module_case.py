"""A module on a grid beside its dense twin in fp64: values, all gradients, and the bytes that were predicted."""

from __future__ import annotations

import torch
from products import mesh_of

from ndtp import CommMeter, Layout

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
# Grids of 1, 2 and 3 dimensions, with and without data parallelism: (grid sizes, scheme).
TWO = [({"x": 2}, "1d-sp"), ({"x": 2}, "1d"), ({"dp": 2}, "3d")]
FOUR = [
    ({"x": 4}, "1d-sp"),
    ({"x": 2, "y": 2}, "2d"),
    ({"x": 2, "y": 2}, "2d-features"),
    ({"dp": 2, "x": 2}, "1d-sp"),
    ({"z": 2, "y": 2}, "3d"),
]
EIGHT = [({"z": 2, "x": 2, "y": 2}, "3d"), ({"dp": 2, "x": 2, "y": 2}, "3d")]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shard(x, layout, mesh):
    return layout.shard(x.detach(), mesh.rank).clone()


def close(actual, expected, what):
    torch.testing.assert_close(actual, expected, **CLOSE, msg=lambda text: f"{what}: {text}")


def check_gradients(module, dense, where):
    """Of all parameters, by their names in the dense twin."""
    names = dict(module.named_parameters())
    assert list(names) == [name for name, _ in dense.named_parameters()], where
    for name, parameter in dense.named_parameters():
        mine = names[name].grad
        assert mine is not None, f"{where}: no gradient of {name}"
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        close(mine[tuple(slice(0, size) for size in parameter.shape)], parameter.grad, f"{where}: d{name}")


def check_rows(grid, module, dense, tokens, features, where, *, seed=1):
    """A module that takes and returns rows: y, dx, the gradients of parameters, and bytes."""
    mesh = mesh_of(grid)
    x, upstream = randn(tokens, features, seed=seed).requires_grad_(), randn(tokens, features, seed=seed + 1)
    mine = shard(x, module.in_layout, mesh).requires_grad_()
    with CommMeter() as meter:
        y = module(mine)
        y.backward(shard(upstream, module.out_layout, mesh))
    expected = dense(x)
    expected.backward(upstream)
    close(y, shard(expected, module.out_layout, mesh), f"{where}: y")
    close(mine.grad, shard(x.grad, module.in_layout, mesh), f"{where}: dx")
    check_gradients(module, dense, where)
    predicted = module.volume(tokens)
    assert meter.volume == predicted, f"{where}: measured {meter.volume}, predicted {predicted}"
    assert not mesh.collectives.in_flight, f"{where}: handles left over"


def rows_of(layout: Layout) -> Layout:
    """Of one number a row."""
    return Layout(layout.grid, layout.dims[0])
