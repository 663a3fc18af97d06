"""What is done with an activation whose features are several parts in one, each of which is split by itself."""

import pytest
import torch
from products import mesh_of

from ndtp import Grid, Layout
from ndtp.models.frame import Frame, Passage
from ndtp.models.hidden import enter, whole


def written(y):
    """Written in place, wherever a function's signature has the tensor that it writes to."""
    torch.mul(y, y, out=y)
    torch.cumsum(y * 1, -1, out=y)
    torch.sort(-y, -1, out=(y, torch.empty(y.shape, dtype=torch.long)))
    torch._foreach_add_([y], 1)
    torch.relu_(input=y)
    z = torch.nn.init.constant_(y * 1, 3.0)
    return y, z, torch.where(y > 2, z, y, out=z * 0)


def check_sections(grid, sections):
    """As gate and up in one weight give them: each rank has its features of every part, rows are split, too."""
    mesh, each = mesh_of(grid), 4
    frame = Frame(mesh, Layout(grid, None, None), 2)
    features = sections * each
    dense = torch.arange(3 * 2 * features, dtype=torch.float64).view(3, 2, features)
    passage = Passage(frame, Layout(grid, "x", "y"), (3, 2), 8, features, features, sections)
    rows = torch.nn.functional.pad(dense.flatten(0, 1), (0, 0, 0, 2))
    parts = [Layout(grid, "x", "y").shard(part, mesh.rank) for part in rows.chunk(sections, 1)]
    x = enter(torch.cat(parts, 1).requires_grad_().clone(), passage)

    assert torch.equal(whole(x), dense)
    for other in (dense * 2, dense[0, 0], dense[:1], torch.tensor(3.0)):
        assert torch.equal(whole(x + other), dense + other), tuple(other.shape)
        assert torch.equal(whole(other * x), dense * other), tuple(other.shape)
    for mine, theirs in zip((x + dense).chunk(sections, -1), (2 * dense).chunk(sections, -1), strict=True):
        assert torch.equal(whole(mine), theirs)
    for mine, theirs in zip(x.chunk(chunks=sections, axis=-1), dense.chunk(sections, -1), strict=True):
        assert torch.equal(whole(mine), theirs)
    assert torch.equal(whole(torch.cat(tensors=[x, x], dim=0)), torch.cat([dense, dense], axis=0))
    assert torch.equal(x.transpose(0, 1), dense.transpose(0, 1))  # gathered
    assert [whole(y).tolist() for y in written(x.detach().clone())] == [y.tolist() for y in written(dense.clone())]
    given = torch.randn(dense.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = dense.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(((x * leaf).clone() * given).sum(), leaf)
    torch.testing.assert_close(gradient, given * dense)


@pytest.mark.parametrize("sections", [2, 3])
def test_parts_of_features_in_one_are_taken_for_what_they_are(ranks, sections):
    ranks(4).run(check_sections, Grid(x=2, y=2), sections)
