import json
import math

import pytest
from typer.testing import CliRunner

from ndtp.algebra.grid import Grid
from ndtp.cli.app import app
from ndtp.cli.demo import grids_for
from ndtp.cli.demo_training import DemoRun, GridRun, text

runner = CliRunner()


def demo(*arguments):
    return runner.invoke(app, ["demo", *map(str, arguments)])


def test_a_short_demo(tmp_path):
    result = demo("--ranks", 4, "--steps", 2, "--output", tmp_path / "out", "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["ok"] is True and len(report["dense"]["losses"]) == 2
    assert [run["scheme"] for run in report["runs"]] == ["1d", "2d", "3d"]
    for run in report["runs"]:
        assert run["ok"] and run["max_deviation"] < report["tolerance"]
        assert run["measured_bytes"] == run["predicted_bytes"] == sum(run["predicted_bytes_by_axis"].values()) > 0
        assert run["losses"][0] == pytest.approx(report["dense"]["losses"][0], abs=1e-5)
    picture = (tmp_path / "out" / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    assert "1D x=4" in result.stderr and "2D x=2 y=2" in result.stderr
    assert max(map(len, result.stderr.splitlines())) <= 100


def test_a_loss_beyond_the_tolerance_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(GridRun, "deviation", 0.5)
    result = demo("--ranks", 2, "--steps", 2, "--output", tmp_path)
    assert result.exit_code == 1
    assert "demo: 1D x=2: a loss is off by 0.5" in result.stderr
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is False


def test_bytes_that_differ_on_any_rank_are_an_error():
    dense = DemoRun(losses=[2.0, 1.0])
    good = DemoRun([2.0, 1.0], [1.0], predicted_bytes=8, measured_bytes=8)
    bad = DemoRun([2.0, 1.0], [1.0], predicted_bytes=8, measured_bytes=12)
    nan = DemoRun([2.0, math.nan], [1.0], predicted_bytes=8, measured_bytes=8)
    grid = Grid(x=2)
    assert GridRun("1d", grid, (good, good), dense).failure is None
    assert "12 bytes a step measured, 8 predicted" in GridRun("1d", grid, (good, bad), dense).failure
    assert "off by inf" in GridRun("1d", grid, (good, nan), dense).failure


@pytest.mark.parametrize(
    "ranks, expected",
    [
        (1, ["1d x=1"]),
        (2, ["1d x=2", "3d z=2"]),
        (4, ["1d x=4", "2d x=2 y=2", "3d z=2 y=2"]),
        (6, ["1d x=6", "2d x=2 y=3", "3d z=2 y=3"]),
        (8, ["1d x=8", "2d x=2 y=4", "3d z=2 x=2 y=2", "3d z=2 y=4"]),
        (12, ["1d x=12", "2d x=3 y=4", "3d z=2 x=2 y=3", "3d z=3 y=4"]),
    ],
)
def test_grids_for_any_number_of_ranks(ranks, expected):
    assert [f"{scheme} {grid}" for scheme, grid in grids_for(ranks)] == expected


def test_wrong_use_is_explained(tmp_path):
    (tmp_path / "file").touch()
    for arguments, message in (
        (("--steps", 1), "--steps"),
        (("--output", tmp_path / "file" / "out"), "cannot be made"),
    ):
        result = demo(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())


def test_the_text_is_real():
    document = bytes(text().tolist())
    assert len(document) > 100_000 and b"lambda" in document


def test_help_has_an_example():
    result = demo("--help")
    assert "Example: ndtp demo --output demo_output" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
