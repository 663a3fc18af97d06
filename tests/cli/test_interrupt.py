import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

# A background job of a shell that ignores SIGINT hands that down to what it starts, this test included.
MAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from ndtp.cli import main; main()"


def marked_processes(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue  # it has just ended, or is not ours
    return found


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("command", ["check", "demo", "bench calibrate"])
def test_ctrl_c_leaves_no_rank_behind(command, tmp_path):
    mark = f"NDTP_TEST_MARK={uuid.uuid4()}"
    arguments = {
        "check": ["--scheme", "1d"],
        "demo": ["--steps", "1000", "--output", str(tmp_path)],
        "bench calibrate": ["--repeats", "1000", "--output", str(tmp_path / "mine.toml")],
    }[command]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *command.split(), "--ranks", "4", *arguments],
        env={**os.environ, **dict([mark.split("=")])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # The command, the process that forks the ranks, and the ranks.
        assert wait_until(lambda: len(marked_processes(mark.encode())) >= 6, 120)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode not in (0, 2)
        assert "Traceback" not in stderr
        assert wait_until(lambda: not marked_processes(mark.encode()), 30), "processes are left behind"
    finally:
        process.kill()
        process.wait()
