"""What tests on a GPU tell `on_device.py`, a plugin of pytest: a line for each test in the file that REPORTS names.

A process whose GPU is gone cannot go on, and ends.
"""

import json
import os

import pytest

REPORTS = "NDTP_TEST_REPORTS"
GONE = 77  # the exit status of a process that has lost its GPU
LONGEST_TEXT = 6000
LONGEST_CALL_S = 100  # shorter than a test may take: its error says where each rank is


def pytest_configure() -> None:
    from ndtp.testing.pool import RankPool

    RankPool.__init__.__defaults__ = (LONGEST_CALL_S,)


def pytest_collection_finish(session: pytest.Session) -> None:
    write(outcome="collected", test="\n".join(item.nodeid for item in session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    write(outcome="started", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.passed and report.when != "call":
        return
    text = str(report.longrepr)[-LONGEST_TEXT:] if report.failed else ""
    write(outcome=report.outcome, test=report.nodeid, seconds=report.duration, text=text)
    if report.failed and not gpu_answers():
        os._exit(GONE)


def write(**line: object) -> None:
    with open(os.environ[REPORTS], "a") as file:
        file.write(json.dumps(line) + "\n")


def gpu_answers() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
