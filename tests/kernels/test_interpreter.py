"""Runs the kernels in Triton's interpreter, in processes of their own.

The switch is read when kernels are imported, and would turn every other Triton user of this process into an interpreted
one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("case_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name):
    """One file of cases; its failures are shown as this test's."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--durations=3",
        str(FOLDER / name),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]


def test_there_are_cases():
    assert len(FILES) >= 3
