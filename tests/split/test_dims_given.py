"""Dims as torch takes them: one by one, none, numbers of other libraries; and numbers in a text."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn

import ndtp
from ndtp import Grid

LAST = np.int64(-1)
FORMS = {
    "flip one by one": lambda h: h.flip(0, 2),
    "count one by one": lambda h: h.relu().count_nonzero(1, 2),
    "count of leading dims": lambda h: h.relu().count_nonzero(0, 1),
    "mean of none": lambda h: h.mean(dim=[]),
    "sum of none": lambda h: h.sum([]),
    "std of none": lambda h: h.std([]),
    "std and mean of none": lambda h: torch.std_mean(h, dim=[])[1],
    "count of none": lambda h: h.relu().count_nonzero([]),
    "norm of none": lambda h: h.norm(dim=[]),
    "vector norm of none": lambda h: torch.linalg.vector_norm(h, dim=[]),
    "nansum of none": lambda h: h.nansum([]),
    "any of none": lambda h: (h > 0).any([]),
    "flip of none": lambda h: h.flip([]),
    "roll along none": lambda h: h.roll(3, ()),
    "a number": lambda h: h[0, 0, 0].softmax(0) + h[0, 0, 0].sum(-1) + h[0, 0, 0].norm(),
    "softmax": lambda h: h.softmax(LAST),
    "sum": lambda h: h.sum((1, LAST)),
    "max": lambda h: h.max(LAST)[0],
    "std": lambda h: h.std(LAST),
    "flip": lambda h: h.flip((0, LAST)),
    "norm": lambda h: h.norm(2, LAST),
    "normalize": lambda h: F.normalize(h, dim=LAST),
    "cosine": lambda h: F.cosine_similarity(h, h.flip(0), dim=LAST),
    "tile": lambda h: h.tile(np.int64(2)),
    "gather": lambda h: h.gather(LAST, torch.zeros(2, 6, 1, dtype=torch.long)),
    "a tensor as dim": lambda h: h.softmax(torch.tensor(2)).sum(torch.tensor(-1)),
    "norm over": lambda h: F.layer_norm(h, (np.int64(16),)),
}


class Formed(nn.Module):
    def __init__(self, forms):
        super().__init__()
        self.table, self.up, self.down, self.forms = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 16), forms

    def forward(self, ids):
        x = self.table(ids)
        h = x + self.down(self.up(x).relu())
        return {name: form(h) for name, form in self.forms.items()}


def check_forms():
    torch.manual_seed(0)
    ids = torch.arange(12).view(2, 6)
    dense = Formed(FORMS).double()
    expected = dense(ids)
    model = ndtp.parallelize(dense, mesh_of(Grid(x=2)), example=ids)
    for name, y in model(ids).items():
        torch.testing.assert_close(y.gathered() if hasattr(y, "gathered") else y, expected[name], msg=name)
    for wrong in (lambda h: h.sum(3), lambda h: h.flip(0, -4), lambda h: h.norm(dim=3)):
        model.forms = {"wrong": wrong}
        with pytest.raises(IndexError, match="Dimension out of range"):
            model(ids)


def test_dims_are_taken_in_every_form(ranks):
    ranks(2).run(check_forms)


class Gated(nn.Module):
    """Parts of one product, of which a row is read number by number."""

    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(8, 16), nn.Linear(8, 3)

    def forward(self, x):
        y = self.both(x)
        a, b = y.chunk(2, dim=-1)
        y = y.detach()
        return self.out(a * b), max(float(each) for each in y[0]), f"{y[0, 0]:.4f}"


def check_numbers():
    torch.manual_seed(0)
    dense, x = Gated(), torch.ones(4, 8)
    expected = dense(x)
    found = ndtp.parallelize(dense, mesh_of(Grid(x=2)), example=x)(x)
    assert found[1:] == (expected[1], expected[2])


def test_numbers_of_split_rows_are_those_of_the_whole(ranks):
    ranks(2).run(check_numbers)
