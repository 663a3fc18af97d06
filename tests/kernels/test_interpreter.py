"""Runs the kernels in Triton's interpreter, in a process of their own.

The switch is read when kernels are imported, and would turn every other Triton user of this process into an interpreted
one.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("case_*.py"))
LIMIT = 600


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """All files in one process, as importing torch and Triton takes as long as many cases; by file, from JUnit."""
    report = tmp_path_factory.mktemp("interpreted") / "cases.xml"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(FOLDER / name) for name in FILES]
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode in (0, 1), done.stdout[-6000:] + done.stderr[-2000:]
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        found[case.get("classname").rpartition(".")[2] + ".py"].append(case)
    return found


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(cases, name):
    """One file of cases; its failures are shown as this test's."""
    found = cases.get(name, [])
    not_passed = [ElementTree.tostring(case, "unicode")[-3000:] for case in found if len(case)]
    assert not not_passed, "\n".join(not_passed[:3])
    assert found, "an empty file would pass as well"


def test_there_are_cases():
    names = ("blocks", "epilogues", "gemm", "grouped", "prepared", "rival", "scatter_epilogues", "signals")
    assert [f"case_{name}.py" for name in names] == FILES
