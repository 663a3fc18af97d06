import json

import torch
from typer.testing import CliRunner

import ndtp
from ndtp.cli.app import app

runner = CliRunner()


def test_all_that_a_bug_report_needs_is_there():
    result = runner.invoke(app, ["info", "--json", "-"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["versions"]["ndtp"] == ndtp.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert {"python", "triton", "numpy"} <= set(report["versions"])
    assert report["backends"]["gloo"] is True and "nccl" in report["backends"]
    assert report["system"]["cores"] >= 1 and report["system"]["os"]
    assert isinstance(report["devices"]["gpus"], list)
    assert report["kernels"]["ndtp_kernels"] is True
    assert "torch" in result.stderr


def test_plain_text_fits():
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0
    assert f"ndtp: {ndtp.__version__}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_help_has_an_example():
    assert "Example: ndtp info" in runner.invoke(app, ["info", "--help"]).stdout
