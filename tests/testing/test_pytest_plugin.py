"""pytest with ndtp installed: a project of a user's, in this process, and what its reports say."""

import json
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

import ndtp.testing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
# pytest's own settings, and a name that no path leads to: `importlib` mode has no sys.path.
SETTINGS = "[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\n"
PROJECT = """
from dataclasses import dataclass

import pytest
import torch.distributed as dist

import ndtp.testing


@dataclass
class Config:
    hidden: int


@pytest.fixture
def config():
    return Config(16)


@ndtp.testing.ranks(x=2)
def test_fails(config):
    rank = dist.get_rank()
    print("here is", rank)
    assert {"rank": rank, "hidden": config.hidden} == {"rank": rank, "hidden": 17 + rank}


def one_of_them():
    if dist.get_rank():
        assert "".join(["spl", "it"]) in ("whole", "partial")
    dist.barrier()


def test_of_the_fixture(ranks):
    ranks(2).run(one_of_them)


class TestOfAClass:
    @pytest.mark.parametrize("hidden", [8])
    @ndtp.testing.ranks(x=2)
    def test_passes(self, mesh, hidden):
        assert str(mesh.grid) == "x=2" and hidden == 8 and dist.get_world_size() == 2


@ndtp.testing.ranks(2)
def test_skips():
    pytest.skip("for a reason")


@ndtp.testing.ranks(2)
def test_skips_on_one():
    if dist.get_rank():
        pytest.skip("alone")


@pytest.mark.xfail(strict=True)
@ndtp.testing.ranks(2)
def test_expected_to_fail():
    raise AssertionError


@pytest.fixture
def lock():
    import threading

    return threading.Lock()


@ndtp.testing.ranks(2)
def test_of_a_lock(lock): ...


@ndtp.testing.ranks(2)
def test_patches(monkeypatch):
    monkeypatch.setattr(dist, "ndtp_patch", 1, raising=False)
    assert dist.ndtp_patch == 1


@ndtp.testing.ranks(2)
def test_finds_no_patch():
    assert not hasattr(dist, "ndtp_patch")


@ndtp.testing.ranks(2)
async def test_async():
    assert dist.get_rank() < 0


@ndtp.testing.ranks(2)
def test_yields():
    yield
"""


class Reports:
    """Each report as it comes out of a worker of pytest-xdist: as text."""

    def __init__(self):
        self.of = {}

    def pytest_configure(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        sent = json.dumps(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))
        report = self.config.hook.pytest_report_from_serializable(config=self.config, data=json.loads(sent))
        if report.when == "call":
            self.of[report.head_line] = report


def test_a_project_of_a_users(tmp_path, monkeypatch, capsys):
    installed = tmp_path / "site" / "ndtp-0.dist-info"
    installed.mkdir(parents=True)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    lines = "".join(f"{name} = {module}\n" for name, module in points.items())
    (installed / "METADATA").write_text("Name: ndtp\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    project = tmp_path / "project" / "tests"
    project.mkdir(parents=True)
    (project / "pytest.ini").write_text(SETTINGS)
    (project / "test_of_users.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.chdir(project)
    # As a session of its own: not what this one is told, and not the plugin that it has.
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    reports = Reports()
    arguments = ["-v", "-p", "no:randomly", f"--junitxml={tmp_path / 'junit.xml'}", str(project)]
    assert pytest.main(arguments, plugins=[reports]) == pytest.ExitCode.TESTS_FAILED
    capsys.readouterr()
    outcomes = {name: report.outcome for name, report in reports.of.items()}
    assert outcomes == {
        "test_fails": "failed",
        "test_of_the_fixture": "failed",
        "TestOfAClass.test_passes[8]": "passed",
        "test_skips": "skipped",
        "test_skips_on_one": "failed",
        "test_expected_to_fail": "skipped",
        "test_of_a_lock": "failed",
        "test_patches": "passed",
        "test_finds_no_patch": "passed",  # of the test before
        "test_async": "failed",
        "test_yields": "failed",
    }

    text = str(reports.of["test_fails"].longrepr)
    for rank in (0, 1):  # each of them its own assertion, with source, values and pytest's comparison
        part = re.search(rf"---- rank {rank} \(x={rank}\) ----\n(.*?)(?=----|\Z)", text, re.DOTALL)[1]
        assert '>       assert {"rank": rank, "hidden": config.hidden} ==' in part
        assert f"E         {{'hidden': 16}} != {{'hidden': {17 + rank}}}" in part
    assert "Traceback" not in text and "pool.py" not in text
    assert {title: body for title, body in reports.of["test_fails"].sections if "rank" in title} == {
        "Captured stdout of rank 1": "here is 1\n"
    }
    text = str(reports.of["test_of_the_fixture"].longrepr)
    assert "E           AssertionError: assert 'split' in ('whole', 'partial')" in text
    assert "stopped before the end: rank 0" in text
    assert "for a reason" in str(reports.of["test_skips"].longrepr)
    assert "of 2 ranks only 1 said pytest.skip('alone')" in str(reports.of["test_skips_on_one"].longrepr)
    assert "lock, a lock, cannot be sent to the ranks" in str(reports.of["test_of_a_lock"].longrepr)
    assert "E       assert 0 < 0" in str(reports.of["test_async"].longrepr), "it has run"
    assert "the result, of type generator, cannot be sent from its rank" in str(reports.of["test_yields"].longrepr)
    failures = {case.get("name"): case.find("failure") for case in ET.parse(tmp_path / "junit.xml").iter("testcase")}
    assert re.match(r"rank [01] \(x=[01]\): AssertionError: assert \{", failures["test_fails"].get("message"))
    assert "!= {'hidden': 18}" in failures["test_fails"].text
    shutil.rmtree(project / "__pycache__", ignore_errors=True)


def test_ranks_wants_one_number_or_axes():
    for number, axes in ((None, {}), (None, {"x": 0}), (0, {}), (-1, {}), (2.5, {}), ("8", {}), (None, {"x": 1.5})):
        with pytest.raises(ValueError, match=r"fix: @ndtp.testing.ranks\(8\)"):
            ndtp.testing.ranks(number, **axes)
    with pytest.raises(ValueError, match="one of them"):
        ndtp.testing.ranks(2, x=2)
    with pytest.raises(
        ValueError, match=r"above test_block without a number of ranks\n  fix: @ndtp.testing.ranks\(8\)"
    ):

        @ndtp.testing.ranks
        def test_block(): ...


def test_the_workflow_in_the_docs_is_one():
    page = (ROOT / "docs" / "testing.md").read_text()
    workflow = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    (job,) = workflow["jobs"].values()
    assert workflow[True] and job["runs-on"]  # YAML takes the key `on` for a truth value
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert any("pip install" in each for each in commands) and any("pytest" in each for each in commands)
    assert os.path.basename(job["steps"][0]["uses"]).startswith("checkout@")
