"""Functions and classes of a notebook's cells on ranks: by value, where cloudpickle is installed."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ndtp.testing

CELL = """
import torch
import torch.distributed as dist
from dataclasses import dataclass

scale = 10

@dataclass
class Answer:
    rank: int
    values: object

def scaled(rank):
    return scale * rank

def work(offset):
    mean = lambda values: values.mean().item()
    return Answer(scaled(dist.get_rank()) + offset, mean(torch.ones(4)))
"""


@pytest.fixture
def notebook(monkeypatch):
    """A `__main__` that no file holds, as IPython makes it."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(CELL, "<cell>", "exec"), main.__dict__)
    return main


def test_cells_run_on_ranks(notebook):
    pytest.importorskip("cloudpickle")
    first = ndtp.testing.run(notebook.work, 2, args=(1,))
    assert first == [notebook.Answer(1, 1.0), notebook.Answer(11, 1.0)], "of the cell's own class"
    notebook.scale = 100  # a cell that is executed once more
    assert [each.rank for each in ndtp.testing.run(notebook.work, 2, args=(1,))] == [1, 101]
    exec("next_one = lambda: scale + 1", notebook.__dict__)
    assert ndtp.testing.run(notebook.next_one, 2) == [101, 101]


def test_without_cloudpickle_the_error_names_it(notebook, monkeypatch):
    monkeypatch.setattr("ndtp.testing.messages.find_spec", lambda name: None)
    for fn in (notebook.work, lambda: None):
        with pytest.raises(ValueError, match="pip install cloudpickle"):
            ndtp.testing.run(fn, 2)


def test_what_cannot_be_imported_goes_by_value(ranks):
    pytest.importorskip("cloudpickle")
    captured = 3

    def local(plus):
        rank = dist.get_rank()
        return lambda x: captured * rank + plus(x)

    assert ranks(4).run(lambda: captured * dist.get_rank()) == [0, 3, 6, 9]
    made = ranks(4).run(local, lambda x: x + 1)
    assert [fn(1) for fn in made] == [2, 5, 8, 11], "what they return goes by value, too"


def report_of(plan):
    """A report whose model has run, and what it says on its rank."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 3))
    ndtp.parallelize(model, ndtp.ProcessGrid(ndtp.Grid(x=2)), **plan)
    model(torch.ones(4, 8))
    report = model.ndtp_report
    return report, str(report), report._repr_html_(), report.gathered, report.losses, report.replaced


@pytest.mark.parametrize("plan", [{"scheme": "1d"}, {"plan": {"*": "1d", "3": None}}], ids=str)
def test_a_report_leaves_its_rank(ranks, plan):
    for report, *said in ranks(2).run(report_of, plan):
        assert said == [str(report), report._repr_html_(), report.gathered, report.losses, report.replaced]
        with pytest.raises(ndtp.LayoutError, match="has left its rank"):
            report.volume(4)
