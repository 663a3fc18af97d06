"""Cases that are alike take turns: a run of the whole suite has a part of them, and a few commits together have all.

The turn is the number of commits, the same wherever a commit is tested.  `NDTP_TURN=all` runs all cases, `NDTP_TURN=7`
those of the seventh turn; whoever names a file or a folder gets all of its cases.
"""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

TURN = "NDTP_TURN"
ALL = "all"

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
    """Return each `every`-th of the cases, from the one whose turn it is; all of them in the turn "all"."""
    cases, turn = list(cases), os.environ.get(TURN, ALL)
    if len(cases) < every:
        raise ValueError(f"{len(cases)} cases cannot take {every} turns")
    return cases if turn == ALL else cases[int(turn) % every :: every]
