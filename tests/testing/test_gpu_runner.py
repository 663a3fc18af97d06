"""The runner of tests on a GPU: what fails runs again, and what ends its process costs the others nothing."""

from on_device import Run, in_batches

TESTS = """
import os, pathlib

HERE = pathlib.Path(__file__).parent

def test_before(): pass

def test_ends_the_process(): os._exit(3)

def test_fails(): assert 1 == 2

def test_fails_once():
    if not (HERE / "seen").exists():
        (HERE / "seen").touch()
        raise AssertionError("the first time")

def test_after(): pass
"""


def test_every_test_has_an_outcome(tmp_path, monkeypatch):
    monkeypatch.setenv("NDTP_TEST_DEVICE", "")
    (tmp_path / "test_some.py").write_text(TESTS)
    run, left = Run(120.0, tmp_path), ["test_some.py"]
    for _ in range(4):
        left = run.round(left, 1)
    name = "test_some.py::test_{}".format
    assert not left and run.outcomes == {
        name("before"): "passed",
        name("ends_the_process"): "failed",
        name("fails"): "failed",
        name("fails_once"): "passed",
        name("after"): "passed",
    }
    assert [len(run.failures[name(test)]) for test in ("ends_the_process", "fails", "fails_once")] == [2, 2, 1]
    assert "assert 1 == 2" in run.failures[name("fails")][0]


def test_time_that_does_not_suffice(tmp_path, monkeypatch):
    monkeypatch.setenv("NDTP_TEST_DEVICE", "")
    (tmp_path / "test_some.py").write_text("import time\n\ndef test_long(): time.sleep(100)\n")
    run = Run(3.0, tmp_path)
    assert run.round(["test_some.py"], 1) and not run.outcomes


def test_tests_of_a_file_stay_together():
    tests = [f"tests/test_{file}.py::test_{i}" for i in range(3) for file in "abcd"]
    batches = in_batches(tests, 2)
    assert sorted(test for batch in batches for test in batch) == sorted(tests)
    assert not {test.split("::")[0] for test in batches[0]} & {test.split("::")[0] for test in batches[1]}
