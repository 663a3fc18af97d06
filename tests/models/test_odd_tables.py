"""Tables of other kinds: whose look-ups change rows, whose gradients are sparse, bags, and tables that code reads."""

import copy

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid, LayoutError


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
    for settings in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(LayoutError, match=r"'table' has .* goes by all ids of a batch.*\n  fix: a grid without dp"):
            check({"dp": 2}, "1d", settings)


class Tied(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(16, 8, **settings), nn.Linear(8, 8), nn.Linear(8, 16, False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.layer(self.table(x)).relu())


def check_tied():
    x = torch.tensor([[1, 2, 3, 3], [3, 2, 5, 6]])
    dense = Tied(scale_grad_by_freq=True).double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", example=x)
    for each in (dense, model):
        each(x).pow(2).sum().backward()
    for mine, expected in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
    for settings in ({"sparse": True}, {"max_norm": 1.0}):
        with pytest.raises(LayoutError, match=r"shares with another layer\n  fix: .*, or a weight of its own"):
            ndtp.parallelize(Tied(**settings), mesh_of(Grid(x=2)), scheme="1d", example=x)


def test_tables_that_are_tied(ranks):
    ranks(2).run(check_tied)


def test_odd_tables(ranks):
    ranks(2).run(check_all)


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag, self.table, self.layer = nn.EmbeddingBag(31, 8, mode=mode), torch.randn(31, 8), nn.Linear(8, 24)
        self.table = nn.Parameter(self.table)

    def forward(self, x, factors):
        weighted = self.bag(x, per_sample_weights=factors) if self.bag.mode == "sum" else 0.0
        starts = torch.arange(x.shape[0]) * x.shape[1]
        rows = F.embedding(x, self.table, padding_idx=2).mean(1)
        return self.layer(self.bag(x) * rows + self.bag(x.flatten(), starts).tanh() + weighted)


def check_bags():
    """Their features are split, and no table is gathered."""
    for mode, sizes, scheme in (("sum", {"x": 2}, "1d"), ("mean", {"y": 2}, "2d"), ("max", {"z": 2}, "3d")):
        torch.manual_seed(0)
        dense, x, factors = Bags(mode).double(), torch.randint(31, (4, 3)), torch.rand(4, 3).double()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(**sizes)), scheme=scheme)
        for each in (dense, model):
            each(x, factors).pow(2).sum().backward()
        for mine, expected in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
        assert not model.ndtp_report.gathered and model.bag.weight.to_local().numel() == 31 * 4


def test_bags(ranks):
    ranks(2).run(check_bags)


class Quotients(nn.Module):
    """A table as the product of two small ones, which the model's own code looks up (DLRM)."""

    def __init__(self, bags):
        super().__init__()
        self.large, self.small = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(4, 12))
        self.find, self.layer = F.embedding_bag if bags else F.embedding, nn.Linear(12, 6)

    def forward(self, x):
        rows = [self.find(ids, table, sparse=True) for ids, table in ((x // 4, self.large), (x % 4, self.small))]
        return self.layer(rows[0] * rows[1])


def check_read_sparsely(sizes):
    mesh = mesh_of(Grid(**sizes))
    for bags in (True, False):
        torch.manual_seed(0)
        dense, x = Quotients(bags), torch.randint(32, (4, 3))
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d", example=x)
        parts = sizes.get("dp", 1)
        for each, mine in ((dense, x), (model, x.chunk(parts)[mesh.coordinate["dp"] if parts > 1 else 0])):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(2):
                each(mine).pow(2).mean().div(parts if each is model else 1).backward()
                optimizer.step()
                optimizer.zero_grad()
        for mine, expected in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor() if hasattr(mine, "full_tensor") else mine, expected)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"dp": 2}])
def test_tables_that_code_reads_sparsely(ranks, sizes):
    ranks(2).run(check_read_sparsely, sizes)
