"""What the operating system says about processes."""

import os
import subprocess
import time


def wait_until_gone(pids):
    pids = list(pids)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


def wait_until_collected(pid):
    """Until not even a zombie is left: its threads, which outlive the first one a little, have closed its sockets."""
    deadline = time.monotonic() + 30
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, f"still there: {pid}"
        time.sleep(0.02)


def is_running(pid):
    """Neither gone nor a zombie that somebody else has yet to collect."""
    state, _ = _state_and_parent(pid)
    return state not in ("", "Z", "X")


def parent_of(pid):
    return int(_state_and_parent(pid)[1])


def _state_and_parent(pid):
    try:
        with open("/proc/self/stat"), open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[1]
    except (FileNotFoundError, ProcessLookupError):
        pass
    command = ["ps", "-o", "stat=,ppid=", "-p", str(pid)]  # macOS has no /proc
    fields = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    return (fields[0][0], fields[1]) if fields else ("", "")
