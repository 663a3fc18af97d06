"""The byte-level model on a grid: loss, all gradients and bytes are those of the dense one."""

import torch
from products import mesh_of

import ndtp
from ndtp import Grid
from ndtp.models.byte_model import ByteModel, ByteModelSizes

SIZES = ByteModelSizes(width=16, inner=32, layers=1, heads=4)


def made():
    torch.manual_seed(0)
    return ByteModel(SIZES).double()


def check_step(sizes, scheme):
    mesh = mesh_of(Grid(sizes))
    dense, model = made(), made().to_grid(mesh, scheme)
    ids, targets = torch.randint(256, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    expected = dense(ids, targets)
    expected.backward()
    with ndtp.CommMeter() as meter:
        loss = model(ids, targets)
        loss.backward()
    torch.testing.assert_close(loss, expected)
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
    assert list(model.state_dict()) == list(dense.state_dict())
    return meter.volume.total


def test_it_is_the_dense_model(ranks):
    for sizes, scheme in (({"dp": 2, "x": 2}, "1d-sp"), ({"z": 2, "y": 2}, "3d")):
        ranks(4).run(check_step, sizes, scheme)
