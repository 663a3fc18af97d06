"""Metrics of torchmetrics on a grid: they gather over all ranks of the program, of which many have the same rows."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torchmetrics import Metric

from ndtp.integrations.grid_rows import data_axes
from ndtp.runtime.process_grid import ProcessGrid

Metrics = TypeVar("Metrics", bound=nn.Module)


def count_rows_once(metrics: Metrics, mesh: ProcessGrid, gathered: bool = False) -> Metrics:
    """Have metrics of torchmetrics gather over the ranks that have rows of their own, those along axes such as `dp`.

    On their own they gather over all ranks, and count a row once for each rank that differs in x, y and z alone.

    Args:
        metrics: a Metric, a MetricCollection, or a module that has some; one with a `process_group` keeps it.
        gathered: each rank updates them with the rows of all ranks, as after `gather_for_metrics`; they gather nothing.

    Returns:
        The same metrics.
    """
    axes = () if gathered else data_axes(mesh)
    for metric in metrics.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            if axes:
                metric.process_group = mesh.group(axes)
            else:
                metric.distributed_available_fn = _never
    return metrics


def _never() -> bool:
    return False
