"""Embeddings whose look-ups change rows, or whose gradients are sparse, stay whole and train as dense ones."""

import copy

import torch
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid


class Words(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.table, self.bag = nn.Embedding(31, 8, **settings), nn.EmbeddingBag(31, 8, mode="sum", **settings)
        self.layer = nn.Linear(8, 24)

    def forward(self, x):
        return self.layer(self.table(x).mean(1) + self.bag(x))


def check(sizes, scheme, settings):
    torch.manual_seed(0)
    mesh, dense, x = mesh_of(Grid(**sizes)), Words(**settings), torch.randint(31, (4, 3))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme)
    kind = torch.optim.SparseAdam if "sparse" in settings else torch.optim.Adam
    for each, rows in ((dense, 1), (model, sizes.get("dp", 1))):
        mine = x.chunk(rows)[mesh.coordinate["dp"] if rows > 1 else 0]
        optimizer = kind([each.table.weight, each.bag.weight], lr=0.1)
        for _ in range(2):
            (each(mine).pow(2).mean() / rows).backward()
            assert each.table.weight.grad.is_sparse == bool(settings.get("sparse"))
            optimizer.step()
            each.zero_grad()
    for mine, expected in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected)


def check_all():
    for settings in ({"sparse": True}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        check({"x": 1, "y": 2}, "2d", settings)
    check({"dp": 2}, "1d", {"sparse": True})


def test_odd_tables(ranks):
    ranks(2).run(check_all)
