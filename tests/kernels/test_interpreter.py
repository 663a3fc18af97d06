"""Runs the kernels in Triton's interpreter, in processes of their own.

The switch is read when kernels are imported, and would turn every other Triton user of this process into an interpreted
one.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("case_*.py"))
LIMIT = 600


def run_file(name):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", str(FOLDER / name)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture(scope="module")
def runs():
    """All files, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(FILES, pool.map(run_file, FILES), strict=True))


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(runs, name):
    """One file of cases; its failures are shown as this test's."""
    done = runs[name]
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # An empty or skipped file would pass as well.
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout[-500:]


def test_there_are_cases():
    names = ("blocks", "epilogues", "gemm", "ops", "rival", "scatter_epilogues")
    assert [f"case_{name}.py" for name in names] == FILES
