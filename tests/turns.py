"""Tests take turns: `make test` has a third of what takes long, and the runs of three commits have all.  CI has two
thirds, and the runs of two commits in a row have all.

The turn is the number of commits, the same wherever a commit is tested.  `NDTP_TURN=all` runs all tests, `NDTP_TURN=7`
those of the seventh turn; whoever names a file or a folder gets all of its tests.  `costs.json` says which tests take
long, and a test that is not in it is in every run.  Write it anew from the report of a run of all, half an hour long:

    NDTP_TURN=all make test JUNIT=report.xml; python tests/turns.py report.xml
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

TURN = "NDTP_TURN"
LONG_TESTS = "NDTP_LONG_TESTS"  # of how many turns a run has the tests that take long: 1, 2 as CI has them, or "all"
ALL = "all"
COSTS = Path(__file__).with_name("costs.json")
LONG = 0.5  # seconds, from which on a test takes turns: nine tenths of the time go to such tests
EVERY = 3  # commits, of which one runs a test that takes long

Case = TypeVar("Case")


def settle_turn(names_tests: bool) -> None:
    """Write the turn into the environment, from which the processes of pytest-xdist and the ranks read it.

    Args:
        names_tests: the command line names files, folders or tests.
    """
    if TURN not in os.environ:
        os.environ[TURN] = ALL if names_tests else str(num_commits())


def num_commits() -> int:
    """Return how many commits lead to this one, 0 where there is no history."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        counted = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return int(counted.stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0


def by_turns(cases: Iterable[Case], every: int) -> list[Case]:
    """Return each `every`-th of the cases, from the one whose turn it is; all of them in the turn "all".

    The cases stay for as many turns as pass between two runs of a test that takes long, which so sees all of them.
    """
    cases, turn = list(cases), os.environ.get(TURN, ALL)
    if len(cases) < every:
        raise ValueError(f"{len(cases)} cases cannot take {every} turns")
    return cases if turn == ALL else cases[int(turn) // EVERY % every :: every]


def left_out(costs: Mapping[str, float]) -> set[str]:
    """Return the tests that are left out of a run, of those that take long.

    Each turn has a third of them, which take a third of their time; a run has this turn, and those after it that
    `NDTP_LONG_TESTS` asks for.

    Args:
        costs: seconds by the name of the test, as pytest has it: `tests/ops/test_chain.py::test_memory[1d]`.
    """
    turn, turns = os.environ.get(TURN, ALL), os.environ.get(LONG_TESTS, "1")
    if ALL in (turn, turns):
        return set()
    run = {(int(turn) + i) % EVERY for i in range(int(turns))}
    by_cost = sorted(costs, key=lambda name: (-costs[name], name))
    # Forth and back over the turns, from the dearest test on, so that all turns take the same time.
    places = [*range(EVERY), *reversed(range(EVERY))]
    return {name for i, name in enumerate(by_cost) if places[i % len(places)] not in run}


def costs_of(reports: Iterable[Path]) -> dict[str, float]:
    """Return the seconds of all tests that take long, from junit reports; the longest where a test is in several."""
    costs: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            costs[name] = max(costs.get(name, 0.0), float(case.attrib["time"]))
    return {name: round(cost, 1) for name, cost in sorted(costs.items()) if cost >= LONG}


if __name__ == "__main__":
    COSTS.write_text(json.dumps(costs_of(map(Path, sys.argv[1:])), indent=0, ensure_ascii=False) + "\n")
