"""Run the tests whose tensors lie on a GPU, several files at a time, and again what failed: `make test DEVICE=cuda`.

    python tests/on_device.py [--workers 6] [--seconds 3000] [--out OUT.json] FOLDER...

The ranks of NCCL share the GPU under MPS, where the machine has it.  A kernel that faults there ends every process:
tests that have lost their GPU end at once, and all that is left runs under a new MPS.  A test that fails runs a second
time, with fewer beside it, and with all kernels loaded at the start: CUDA loads a kernel at its first use, for which it
may wait until the GPU is idle, while another rank's kernel waits for this one.  What fails twice is a failure.  The
exit status is 1 after a failure, and 124, as that of `timeout`, where the time did not suffice for all tests.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpu_reports import GONE, REPORTS
from turns import COSTS

BATCHES = 4  # of files, for each worker: pytest starts anew for each
LONGEST_TEST_S = 150
UNKNOWN_S = 0.3  # a test that costs.json does not know
ATTEMPTS = 2
OUT_OF_TIME = 124
ROOT = Path(__file__).parent.parent
DONE = ("passed", "skipped")
# A failure that says so is no failure of the test where another process has lost the GPU for all.
OF_A_LOST_GPU = ("CUDA error", "Cuda failure", "CUDA-capable device", "without raising")


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Kernels of the processes that start within run at once, where the machine has NVIDIA's service for that (MPS)."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as pipes:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=pipes, CUDA_MPS_LOG_DIRECTORY=pipes)
        subprocess.run([control, "-d"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", capture_output=True, timeout=20, check=False)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


class Run:
    """What has become of each test, by its id.

    Args:
        seconds: that all rounds may take together.
        root: the folder that the names of tests are relative to.
    """

    def __init__(self, seconds: float, root: Path = ROOT) -> None:
        self.root = root
        self.deadline = time.monotonic() + seconds
        self.outcomes: dict[str, str] = {}
        self.took: dict[str, float] = {}
        self.failures: dict[str, list[str]] = collections.defaultdict(list)
        self.lost = threading.Event()  # some tests have lost the GPU in this round
        self._at_hand = threading.Lock()

    def settled(self, test: str) -> bool:
        return self.outcomes.get(test) in DONE or len(self.failures[test]) >= ATTEMPTS

    def batch(self, tests: list[str]) -> list[str]:
        """Run tests or files of tests in one process; returns the tests that are to run again."""
        with tempfile.TemporaryDirectory() as folder:
            reports = Path(folder, "reports.jsonl")
            environment = {
                **os.environ,
                REPORTS: str(reports),
                "NDTP_TEST_DEVICE": os.environ.get("NDTP_TEST_DEVICE", "cuda"),
                "OMP_NUM_THREADS": "1",
            }
            environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
            if any(self.failures[test] for test in tests):
                environment["CUDA_MODULE_LOADING"] = "EAGER"
            options = ["-p", "gpu_reports", "-p", "no:cacheprovider", f"--timeout={LONGEST_TEST_S}"]
            command = [sys.executable, "-m", "pytest", *options, "--timeout-method=thread", *tests]
            with open(Path(folder, "log"), "w+b") as log:
                process = subprocess.Popen(
                    command, env=environment, cwd=self.root, stdout=log, stderr=log, start_new_session=True
                )
                while time.monotonic() < self.deadline and not self.lost.wait(0.2) and process.poll() is None:
                    pass
                in_time = process.poll() is not None
                kill_group(process)
                log.seek(0)
                said = log.read().decode(errors="replace")[-3000:]
            lines = [json.loads(line) for line in reports.read_text().splitlines()] if reports.exists() else []
        if process.returncode == GONE:
            self.lost.set()
        with self._at_hand:
            return self._count(tests, lines, said, in_time and process.returncode != GONE)

    def _count(self, tests: list[str], lines: list[dict[str, str]], said: str, in_time: bool) -> list[str]:
        collected, started = list(tests), None
        for line in lines:
            outcome, test = line["outcome"], line["test"]
            if outcome == "collected":
                collected = test.split("\n") if test else []
            elif outcome == "started":
                started = test
            elif outcome in DONE:
                if self.outcomes.get(test) != "failed" or outcome == "passed":
                    self.outcomes[test] = outcome
                self.took[test] = float(line["seconds"])
                started = None
            elif not (self.lost.is_set() and any(words in line["text"] for words in OF_A_LOST_GPU)):
                self.outcomes[test] = outcome
                self.failures[test].append(line["text"])
                started = None
        if in_time and (started or not lines):  # the process ended with it
            for test in [started] if started else collected:
                self.outcomes[test] = "failed"
                self.failures[test].append(said)
        return [test for test in collected if not self.settled(test)]

    def round(self, tests: list[str], workers: int) -> list[str]:
        """Run tests under one MPS; returns those that are to run again."""
        waiting = collections.deque(in_batches(tests, workers * BATCHES))
        again: list[str] = []
        self.lost.clear()

        def work() -> None:
            while waiting and not self.lost.is_set() and time.monotonic() < self.deadline:
                again.extend(self.batch(waiting.popleft()))

        with shared_gpu():
            threads = [threading.Thread(target=work) for _ in range(workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return again + [test for batch in waiting for test in batch]


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def files_of(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        path = ROOT / name
        if path.is_dir():
            yield from (str(file.relative_to(ROOT)) for file in sorted(path.rglob("test_*.py")))
        else:
            yield name


def in_batches(tests: Iterable[str], most: int) -> list[list[str]]:
    """Return at most so many batches of about the same cost; the tests of one file stay together."""
    costs: dict[str, float] = json.loads(COSTS.read_text())
    files: dict[str, list[str]] = collections.defaultdict(list)
    for test in tests:
        files[test.split("::")[0]].append(test)
    of_file = {file: 2.0 + sum(costs.get(test, UNKNOWN_S) for test in group) for file, group in files.items()}
    for test, cost in costs.items():  # of a file that is named as a whole
        file = test.split("::")[0]
        if files.get(file) == [file]:
            of_file[file] += cost
    batches: list[list[str]] = [[] for _ in range(min(most, len(files)))]
    sums = [0.0] * len(batches)
    for file in sorted(files, key=of_file.__getitem__, reverse=True):
        least = sums.index(min(sums))
        batches[least] += files[file]
        sums[least] += of_file[file]
    return batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", metavar="FOLDER", help="or a file, or the name of a test")
    parser.add_argument("--workers", type=int, default=6, help="processes of tests at a time; MPS has 48 clients")
    parser.add_argument("--seconds", type=float, default=3000.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begin = time.monotonic()
    left = list(files_of(arguments.names))
    run, workers = Run(arguments.seconds), arguments.workers
    while left and time.monotonic() < run.deadline:
        left = run.round(left, workers)
        print(f"{time.monotonic() - begin:.0f} s: {summary(run)}; {len(left)} to run", flush=True)
        workers = max(1, workers // 2)
    failed = sorted(test for test, outcome in run.outcomes.items() if outcome == "failed")
    if arguments.out:
        result = {
            "seconds": round(time.monotonic() - begin), "counts": collections.Counter(run.outcomes.values()),
            "failed": {test: run.failures[test] for test in failed}, "not run": left,
            "passed at the second attempt": {
                test: texts for test, texts in run.failures.items() if texts and run.outcomes[test] == "passed"
            },
            "slowest": dict(sorted(run.took.items(), key=lambda item: -item[1])[:40]),
        }  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for test in failed:
        print("FAILED", test, "\n   ", "\n    ".join(run.failures[test][-1].splitlines()[-6:]))
    print(f"{summary(run)}; {len(left)} not run")
    return 1 if failed else OUT_OF_TIME if left else 0


def summary(run: Run) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in collections.Counter(run.outcomes.values()).items())


if __name__ == "__main__":
    sys.exit(main())
