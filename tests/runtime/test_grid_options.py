"""What a `ProcessGrid` refuses, whatever it runs on: before any group is made, with the value in the message."""

import math
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ndtp import Grid, GridError, ProcessGrid
from ndtp.collectives import nccl


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, 0.0009, -1, math.inf, math.nan, True, "60", 1e10, timedelta(1)])
def test_a_timeout_is_a_number_of_seconds_that_torch_can_count(timeout):
    with pytest.raises(GridError) as caught:
        ProcessGrid(Grid(x=1), timeout=timeout)
    assert f"timeout={timeout!r}" in str(caught.value) and "0.001" in str(caught.value)


@pytest.mark.parametrize("timeout", [0.001, 1, 60.5, 1e9, torch.tensor(3).item()])
def test_timeouts_that_are_taken(timeout):
    assert ProcessGrid(Grid(x=1), timeout=timeout).timeout == timeout


@pytest.mark.parametrize(
    "options",
    [
        {"free_sms": -1, "gemm": "kernels"},
        {"free_sms": 1.5, "gemm": "kernels"},
        {"free_sms": True, "gemm": "kernels"},
        {"max_ctas": 0},
        {"max_ctas": True},
        {"max_ctas": "4"},
        {"ring_bytes": -1},
        {"ring_bytes": 1e6},
        {"ring_bytes": None},
        {"groups_per_axis": True},
        {"groups_per_axis": 0},
        {"groups_per_axis": "2"},
        {"gemm": "cublas"},
        {"gemm": None},
        {"check": "no"},
        {"high_priority": 1},
        {"register_buffers": 0},
        {"device_type": "gpu"},
        {"device_type": "cpu:0"},
        {"device_type": ""},
        {"device_type": torch.device("cpu")},
    ],
    ids=lambda options: "-".join(f"{name}={value!r}" for name, value in options.items()),
)
def test_options_that_make_no_sense(options):
    with pytest.raises(GridError) as caught:
        ProcessGrid(Grid(x=1), **options)
    name, value = next(iter(options.items()))
    assert f"{name}={value!r}" in str(caught.value)


def test_nccl_is_told_the_timeout_where_torch_reads_it():
    """torch overwrites that of the options by the argument of `new_group`, or by its default."""
    options = SimpleNamespace(config=SimpleNamespace())
    made = mock.Mock(return_value=options)
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=made), create=True),
        mock.patch.object(nccl, "device", lambda: torch.device("cuda", 3)),
    ):
        arguments = nccl.group_arguments(7.5, high_priority=True, max_ctas=4)
        default = nccl.group_arguments(None, high_priority=False, max_ctas=None)
    assert arguments["timeout"] == timedelta(seconds=7.5) and default["timeout"] is None
    assert arguments["pg_options"] is options and options.config.max_ctas == 4
    assert arguments["device_id"] == torch.device("cuda", 3)
    assert [call.kwargs for call in made.call_args_list] == [
        {"is_high_priority_stream": True},
        {"is_high_priority_stream": False},
    ]
