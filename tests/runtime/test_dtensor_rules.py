"""Operations of which DTensor's rule gives other numbers than dense tensors give the numbers of dense ones on a grid.

`every_operation.py` compares torch's samples of all its operations.
"""

import pytest
import torch
import torch.nn.functional as F
from every_operation import is_same
from products import mesh_of
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ndtp import Grid
from ndtp.runtime.grid_parts import full_of
from ndtp.runtime.grid_tensor import GridTensor, become

PLACED = ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()])
ROWS = torch.randperm(32, generator=torch.Generator().manual_seed(1))


def wide(rows):
    return rows[:, None].expand(-1, 16)


WRITES = {
    "rows by a number": lambda w, rows, given: w.__setitem__((rows, slice(None)), 1),
    "rows": lambda w, rows, given: w.__setitem__(rows, given),
    "index_add_": lambda w, rows, given: w.index_add_(0, rows, given),
    "index_copy_": lambda w, rows, given: w.index_copy_(0, rows, given),
    "scatter_": lambda w, rows, given: w.scatter_(0, wide(rows), given),
    "scatter_add_": lambda w, rows, given: w.scatter_add_(0, wide(rows), given),
    "index_add": lambda w, rows, given: w.copy_(w.index_add(0, rows, given)),
    "scatter": lambda w, rows, given: w.copy_(w.scatter(0, wide(rows), given)),
    "addmm_": lambda w, rows, given: w.addmm_(given.new_ones(32, len(rows)), given),
}


def on_grid(x, mesh, placements):
    return GridTensor(distribute_tensor(x, mesh.device_mesh, placements))


def whole(x):
    return full_of(x) if isinstance(x, GridTensor) else x


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def check_writes():
    mesh, dense = mesh_of(Grid(x=2, y=2)), normal(32, 16)
    for placements in PLACED:
        for count in (8, 24):
            rows, given = ROWS[:count], normal(count, 16)
            for name, write in WRITES.items():
                expected, found = dense.clone(), on_grid(dense, mesh, placements)
                write(expected, rows, given)
                write(found, on_grid(rows, mesh, [Replicate()] * 2), on_grid(given, mesh, [Shard(0), Shard(1)]))
                torch.testing.assert_close(whole(found), expected, msg=f"{name}, {count} rows, {placements}")


def check_results():
    mesh, dense, picture = mesh_of(Grid(x=2, y=2)), normal(32, 16), normal(4, 4, 4, 4)
    kernel = normal(4, 4, 3, 3)
    for placements in PLACED:
        w, image = on_grid(dense, mesh, placements), on_grid(picture, mesh, placements)
        for k in (16, 31, 8):  # DTensor keeps the sizes of the first
            found, expected = torch.topk(w.norm(dim=1), k), torch.topk(dense.norm(dim=1), k)
            assert found.indices.shape == (k,) and torch.equal(whole(found.indices), expected.indices), placements
        weights = on_grid(kernel, mesh, placements)
        for name, found, expected in (
            ("conv2d", F.conv2d(image, weights), F.conv2d(picture, kernel)),
            ("conv_transpose2d", F.conv_transpose2d(image, weights), F.conv_transpose2d(picture, kernel)),
            ("argmax", w.argmax(1, keepdim=True), dense.argmax(1, keepdim=True)),
            ("cumsum", w.cumsum(-1) + w.cumsum(-2), dense.cumsum(-1) + dense.cumsum(-2)),
            ("cumprod", w.cumprod(-1), dense.cumprod(-1)),
            ("hfft2", torch.fft.hfft2(w), torch.fft.hfft2(dense)),
        ):
            torch.testing.assert_close(whole(found), expected, rtol=1e-4, atol=1e-3, msg=f"{name}, {placements}")


def check_padding():
    """Zeros behind the sizes of the whole are no numbers of it."""
    mesh, dense = mesh_of(Grid(x=2, y=2)), normal(5, 7)
    w = nn.Parameter(dense.clone())
    become(w, distribute_tensor(F.pad(dense, (0, 1, 0, 3)), mesh.device_mesh, [Shard(0), Shard(1)]), "w", (5, 7))
    for dim in (0, 1, -1):
        assert torch.equal(whole(w.detach().count_nonzero(dim)), dense.count_nonzero(dim)), dim
    assert int(w.detach().count_nonzero()) == 35


@pytest.mark.parametrize("check", [check_writes, check_results, check_padding])
def test_operations_give_what_they_give_of_dense_tensors(ranks, check):
    ranks(4).run(check)


def test_the_program_finds_what_is_wrong():
    dense = normal(4, 4)
    assert is_same([dense.clone(), 2], [dense, 2])
    for other in ([dense + 1e-2, 2], [dense, 3], [dense[:2], 2], [dense.double(), 2], [dense]):
        assert not is_same(other, [dense, 2])
