"""Tensor-core utilization of single products, read from the GPU's hardware counters.

By Nsight Compute (`ncu`) where it is installed, else by the CUPTI range profiler inside torch's.  Counters need
permission and a driver that offers them; where they cannot be read the result says why.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Share of a kernel's time in which the tensor pipes work, by the name that a chip and a version of ncu give it.
COUNTERS = ("sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active", "sm__inst_executed_pipe_tensor")
SUFFIX = ".avg.pct_of_peak_sustained_elapsed"
# A kernel that no product launches stands between two products in the profiler's list.
SEPARATOR = "distribution_elementwise"

Run = Callable[[], Tensor]


class CountersUnavailable(RuntimeError):
    """Counters cannot be read here; the message says why."""


def read_counters(script: Path, jobs: Sequence[Mapping[str, Any]], runs: Mapping[str, Run], seconds: float) -> Any:
    """{"profiler", "counter", "percent": {label: utilization}}, or {"unavailable": why}.

    Args:
        script: run as `script --counted JOBS` under ncu, it must call `count` on the runs of `jobs`.
        jobs: what the script needs to make the runs anew, each with its "label".
        runs: label -> the same products in this process, for torch's profiler.
        seconds: limit for ncu.
    """
    reasons = []
    for profiler in (lambda: _by_ncu(script, jobs, seconds), lambda: _by_torch(runs)):
        try:
            return profiler()
        except CountersUnavailable as why:
            reasons.append(str(why))
    return {"unavailable": "; ".join(reasons)}


def count(runs: Mapping[str, Run]) -> None:
    """Run each product once between separators, with the profiler listening to nothing else."""
    mark = torch.empty(1024, device="cuda")
    for run in runs.values():
        run()  # compiles what has to be
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for run in runs.values():
        mark.normal_()
        run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def _by_ncu(script: Path, jobs: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountersUnavailable("ncu is not installed")
    counter = _known_counter(ncu, seconds)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        # The clocks stay as they are: a lower, locked clock would be another measurement.
        command = [
            ncu, "--csv", "--log-file", str(log), "--clock-control", "none", "--profile-from-start", "off",
            "--metrics", counter + SUFFIX, sys.executable, str(script), "--counted", json.dumps(list(jobs)),
        ]  # fmt: skip
        output = _output(command, seconds)
        text = log.read_text() if log.exists() else ""
    found = ncu_percentages(text, counter + SUFFIX)
    labels = [job["label"] for job in jobs]
    if len(found) != len(labels):
        said = [line for line in (text + output).splitlines() if "==ERROR==" in line or "==WARNING==" in line]
        why = said[0] if said else f"it reported {len(found)} of {len(labels)} products"
        raise CountersUnavailable(f"ncu: {why.strip()}")
    return {"profiler": "ncu", "counter": counter + SUFFIX, "percent": dict(zip(labels, found, strict=True))}


def _output(command: Sequence[str], seconds: float) -> str:
    """What a command prints; one that takes too long is ended with the program that it profiles."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=max(seconds, 1))[0]
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise CountersUnavailable(f"ncu: {seconds:.0f} s were not enough") from error


def _known_counter(ncu: str, seconds: float) -> str:
    """The first of COUNTERS that this ncu knows for the chip at hand."""
    words = set(_output([ncu, "--query-metrics"], seconds).split())
    for counter in COUNTERS:
        if counter in words:
            return counter
    raise CountersUnavailable(f"ncu: it lists none of {', '.join(COUNTERS)}")


def ncu_percentages(text: str, metric: str) -> list[float]:
    """One number for each product in ncu's CSV: that of its busiest kernel (split K has a second, without products)."""
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    products: list[list[float]] = []
    for row in rows:
        if row.get("Metric Name") != metric:
            continue
        if SEPARATOR in row["Kernel Name"]:
            products.append([])
        elif products:
            products[-1].append(_number(row["Metric Value"]))
    return [max(values) for values in products if values]


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError as error:  # ncu writes "n/a" or "no data"
        raise CountersUnavailable(f"ncu: a counter reads {text!r}") from error


def _by_torch(runs: Mapping[str, Run]) -> dict[str, Any]:
    """CUPTI's range profiler.  Builds of torch without it return no range, and say nothing."""
    from torch._C._profiler import _ExperimentalConfig

    for counter in COUNTERS:
        percent = {}
        for label, run in runs.items():
            run()
            torch.cuda.synchronize()
            settings = _ExperimentalConfig(profiler_metrics=[counter + SUFFIX], profiler_measure_per_kernel=True)
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                try:
                    with torch.profiler.profile(
                        activities=[torch.profiler.ProfilerActivity.CUDA], experimental_config=settings
                    ) as profile:
                        run()
                        torch.cuda.synchronize()
                    profile.export_chrome_trace(str(trace))
                except RuntimeError as error:
                    raise CountersUnavailable(f"torch.profiler: {str(error).splitlines()[0][:200]}") from error
                values = list(trace_percentages(json.loads(trace.read_text()), counter + SUFFIX))
            if not values:
                break
            percent[label] = max(values)
        else:
            if percent:
                return {"profiler": "torch", "counter": counter + SUFFIX, "percent": percent}
    raise CountersUnavailable("torch.profiler: this build returns no counters")


def trace_percentages(trace: Mapping[str, Any], metric: str) -> Iterator[float]:
    """The metric of every range in a trace of torch's profiler."""
    for event in trace.get("traceEvents", ()):
        if event.get("cat") == "cuda_profiler_range" and metric in event.get("args", {}):
            yield float(event["args"][metric])
