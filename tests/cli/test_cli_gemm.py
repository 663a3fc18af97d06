from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from ndtp.cli.app import app
from ndtp.errors import LayoutError

run = CliRunner().invoke


def test_info_shows_the_choice_and_every_candidate():
    result = run(app, ["info", "--gemm", "8192", "14336", "4096", "--json", "-"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert sum(row["chosen"] for row in report["candidates"]) == 1
    assert report["choice"] in [row["config"] for row in report["candidates"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_without_a_gpu_nothing_is_called_measured():
    result = run(app, ["bench", "gemm", "--shape", "512,512,512", "--json", "-"])
    assert result.exit_code == 0, result.output
    assert "not measured" in result.stderr
    assert json.loads(result.stdout)["measured"] is False
    refused = run(app, ["bench", "gemm", "--tune"])
    assert isinstance(refused.exception, LayoutError) and "no GPU" in str(refused.exception)


@pytest.mark.parametrize("text", ["8192", "1,2", "1,2,x", "0,1,1"])
def test_sizes_that_are_no_product(text):
    result = run(app, ["bench", "gemm", "--shape", text])
    assert isinstance(result.exception, LayoutError) and "fix: M,N,K" in str(result.exception)


def test_sizes_below_one_are_refused():
    result = run(app, ["info", "--gemm", "8", "0", "8"])
    assert isinstance(result.exception, LayoutError) and "at least 1" in str(result.exception)
