from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from ndtp.cli.app import app

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
    assert refused.exit_code == 2 and "no GPU" in refused.stderr


@pytest.mark.parametrize("text", ["8192", "1,2", "1,2,x", "0,1,1", "1,2,²", "1,2,3,4", ""])
def test_sizes_that_are_no_product(text):
    result = run(app, ["bench", "gemm", "--shape", text])
    assert result.exit_code == 2 and "write it as positive integers, like 8192,14336,4096 (M,N,K)" in result.stderr


def test_sizes_below_one_are_refused():
    result = run(app, ["info", "--gemm", "8", "0", "8"])
    assert result.exit_code == 2 and "--gemm: '8,0,8'; write it as positive integers" in result.stderr


def test_kernels_index_with_32_bits():
    result = run(app, ["info", "--gemm", "8", "2147483648", "8"])
    assert result.exit_code == 2 and "at most 2,147,483,647" in result.stderr


def test_a_dtype_without_kernels_is_refused():
    result = run(app, ["info", "--gemm", "8", "8", "8", "--dtype", "int8"])
    assert result.exit_code == 2 and "'int8'; it must be one of bfloat16, float16, float32" in result.stderr
