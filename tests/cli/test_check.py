import json
import os

import pytest
import torch
from typer.testing import CliRunner

from ndtp.algebra.grid import Grid
from ndtp.algebra.schemes import SCHEMES
from ndtp.cli.app import app
from ndtp.cli.cases import cases, plan_of
from ndtp.cli.check import DTYPES, one_of_each_kind

runner = CliRunner()


def check(*arguments):
    return runner.invoke(app, ["check", *map(str, arguments)])


def test_all_is_well_on_two_ranks():
    result = check("--ranks", 2, "--scheme", "3d", "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert len(report["cases"]) == 3 * 35
    assert len({case["name"] for case in report["cases"]}) == len(report["cases"])
    for case in report["cases"]:
        assert case["ok"] and case["max_error"] < 1e-3
        assert case["max_error"] > 0 or case["kind"] == "padded block"  # that one runs on integers alone
        assert case["measured_bytes"] == case["predicted_bytes"]
    assert sum(case["measured_bytes"] for case in report["cases"]) > 0
    assert "all 105 cases agree" in result.stderr
    assert max(map(len, result.stderr.splitlines())) <= 100


def test_low_precision_and_a_2d_scheme_with_a_third_axis(tmp_path):
    path = tmp_path / "check.json"
    result = check("--ranks", 4, "--quick", "--scheme", "2d", "--dtype", "bf16", "--dtype", "bfloat16", "--json", path)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert {case["dtype"] for case in report["cases"]} == {"bfloat16"}
    assert {case["grid"]["z"] for case in report["cases"]} == {1, 2, 4}
    assert "cases agree" in result.stdout


def test_quick_takes_one_grid_of_each_kind():
    """Every scheme on every choice of axes, and both products and all blocks of each."""
    result = check("--ranks", 2, "--quick", "--json", "-")
    assert result.exit_code == 0, result.output
    cases = json.loads(result.stdout)["cases"]
    grids = {str(case["grid"]) for case in cases}
    assert len(grids) == 3 and len(cases) == 3 * len(SCHEMES) * 5
    assert {case["kind"] for case in cases} == {"up", "down", "block", "gated block", "padded block"}
    assert len(one_of_each_kind(Grid.all(4))) == 6  # z, x, y and the pairs of them
    assert len(one_of_each_kind(Grid.all(8))) == 7 and Grid(z=2, x=2, y=2) in one_of_each_kind(Grid.all(8))


def test_one_rank():
    result = check("--ranks", 1, "--scheme", "2d", "--json", "-")
    assert result.exit_code == 0, result.output
    assert all(case["measured_bytes"] == 0 for case in json.loads(result.stdout)["cases"])


@pytest.mark.parametrize("collective, scheme", [("all_gather", "3d"), ("reduce_scatter", "3d"), ("all_reduce", "1d")])
def test_a_broken_collective_is_found_and_named(collective, scheme):
    result = check("--ranks", 2, "--quick", "--scheme", scheme, "--break-collective", collective, "--json", "-")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    failed = [case for case in report["cases"] if not case["ok"]]
    assert failed and all("rank " in case["failure"] for case in failed)
    assert failed[0]["name"] in result.stderr
    assert failed[0]["failure"] in result.stderr


def test_a_broken_collective_that_nobody_uses_breaks_nothing():
    assert check("--ranks", 2, "--quick", "--scheme", "1d", "--break-collective", "all_to_all").exit_code == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--scheme", "4d"), "'4d'; it must be one of 1d, 1d-sp, 2d, 2d-features, 3d"),
        (("--dtype", "float8"), "'float8'; it must be one of float32, float64, bfloat16, float16"),
        (("--ranks", 0), "--ranks"),
        (("--rank", 8), "--rank"),
    ],
)
def test_wrong_use_is_explained(arguments, message):
    result = check(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_another_number_of_ranks_than_torchrun_has_is_wrong_use(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    result = check("--ranks", 2)
    assert result.exit_code == 2
    assert "2 ranks, but torchrun started 4" in result.stderr


def check_as_a_rank_of_torchrun():
    """With the environment that a launcher gives: exit status, standard output and standard error."""
    launched = {"RANK": torch.distributed.get_rank(), "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}
    os.environ.update({name: str(value) for name, value in launched.items()})
    try:
        result = check("--quick", "--scheme", "2d", "--json", "-")
    finally:
        for name in launched:
            del os.environ[name]
    return result.exit_code, result.stdout, result.stderr


def test_under_torchrun_one_rank_writes_for_all(ranks):
    """Scripts are started by torchrun itself in testing/test_launch.py."""
    (status, out, err), other = ranks(2).run(check_as_a_rank_of_torchrun)
    assert status == 0, err
    report = json.loads(out)
    assert report["ok"] and report["ranks"] == 2
    assert err.count("cases agree") == 1
    assert other == (0, "", "")


def test_every_form_of_every_scheme_is_a_case():
    for grid in Grid.all(8):
        for scheme in SCHEMES:
            plans = {plan_of(case, grid).equation for case in cases(scheme, "float32") if "block" not in case.kind}
            assert len(plans) == 2 * 4 * 2, "two products, four transposes, batched and not"
    assert len({case.name(grid) for dtype in DTYPES for case in cases("3d", dtype)}) == 4 * 35


def test_help_has_an_example():
    result = check("--help")
    assert result.exit_code == 0
    assert "Example: ndtp check" in result.stdout
    assert "--break-collective" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_a_rank_that_fails_is_an_error_that_names_the_case(monkeypatch):
    monkeypatch.setattr("ndtp.cli.cases.check_grid", dies)
    result = check("--ranks", 2, "--scheme", "1d", "--json", "-")
    assert result.exit_code == 1
    assert "rank 1 (z=0 x=0 y=1): RuntimeError: case '1d z=1 x=1 y=2 float32 up' stopped: boom" in result.stderr
    report = json.loads(result.stdout)
    assert report["ok"] is False and "boom" in report["error"]


def dies(counter, sizes, *arguments):
    import ndtp.cli.cases as module

    def boom(case, mesh):
        if mesh.rank == 1:
            raise RuntimeError("boom")
        torch.distributed.barrier()

    module._check_product = boom
    return module.check_grid(counter, sizes, *arguments)
