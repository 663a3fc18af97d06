"""Metrics of torchmetrics in a program of its own: each row counts once on any grid."""

import pytest
import torch
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

import ndtp
from ndtp.integrations import count_rows_once


def counted(axes, gathered):
    mesh = ndtp.ProcessGrid(ndtp.Grid(axes))
    metrics = MetricCollection({"matrix": MulticlassConfusionMatrix(2), "sum": SumMetric()})
    if gathered is not None:
        assert count_rows_once(metrics, mesh, gathered=gathered) is metrics
    classes, truth = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 0, 1])
    if not gathered and "dp" in axes:
        classes, truth = (each.chunk(2)[mesh.grid.coordinate(mesh.rank)["dp"]] for each in (classes, truth))
    metrics["matrix"].update(classes, truth)
    metrics["sum"].update(classes)
    return metrics["matrix"].compute().tolist(), metrics["sum"].compute().item()


@pytest.mark.parametrize(("axes", "gathered"), [({"x": 2}, False), ({"dp": 2}, False), ({"dp": 2}, True)])
def test_rows_count_once(ranks, axes, gathered):
    assert ranks(2).run(counted, axes, gathered) == [([[1, 1], [0, 2]], 3.0)] * 2


def test_the_reason_is_there(ranks):
    """Where this fails torchmetrics asks no group of all ranks, and `count_rows_once` can go."""
    assert ranks(2).run(counted, {"x": 2}, None) == [([[2, 2], [0, 4]], 6.0)] * 2
