"""The log of `ndtp train`: a line a step in log.csv and for TensorBoard, and what its columns are measured by."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtp.cli.job import Job
    from ndtp.runtime.process_grid import ProcessGrid

LOG = "log.csv"
COLUMNS = (
    "step", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "mfu", "exposed_communication",
    "memory_mib", "grid",
)  # fmt: skip
RECORDED_EVERY = 10  # steps: recording one takes time of its own
SHOWN_ROWS, TAIL_BYTES = 5, 4096


class StepMeter:
    """Measures the steps of this rank.

    Attributes:
        seconds: of the last step.
        exposed: the part of the last step in which the rank waited for a collective; None where it was not recorded.
    """

    def __init__(self, job: Job, mesh: ProcessGrid | None) -> None:
        self.mesh = mesh
        self.seconds, self.exposed = 0.0, None if mesh is None else float("nan")
        self._steps, self._captures = 0, job.capture  # a replay has no collectives to look at
        self._flops = step_flops(job) if job.hardware else None
        self._peak = peak_flops(job) if job.hardware else 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        from ndtp.collectives.recorder import Recorder

        self._steps += 1
        # The second step of every ten: in the first one programs are bound.
        recorded = self.mesh is not None and not self._captures and self._steps % RECORDED_EVERY == 2
        recorder: Any = Recorder(self.mesh) if recorded and self.mesh is not None else nullcontext()
        start = time.perf_counter()
        with recorder:
            yield
        self.seconds = max(time.perf_counter() - start, 1e-9)
        waits = [span for span in recorder.spans() if span.kind == "wait"] if recorded else []
        self.exposed = sum(span.end - span.start for span in waits) / self.seconds if recorded else None

    @property
    def mfu(self) -> float | None:
        """Flops of the model, forward and backward, a second, as a part of what the devices could do."""
        return None if self._flops is None else self._flops / self.seconds / self._peak


def step_flops(job: Job) -> float | None:
    """Flops of a step of the dense model, counted on tensors without memory; None where its code needs numbers.

    Those of backward are taken for twice those of forward; recomputation does not count.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from ndtp.models.byte_model import ByteModel

    try:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            ids = torch.zeros(1, job.context, dtype=torch.long)
            if job.config is None:
                ByteModel(job.sizes)(ids, ids)
            else:
                from transformers import AutoConfig, AutoModelForCausalLM

                AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.config))(input_ids=ids)
    except (RuntimeError, NotImplementedError):
        return None
    return 3.0 * counter.get_total_flops() * job.batch


def peak_flops(job: Job) -> float:
    """Flops a second of all devices, by the table of --hardware."""
    from math import prod

    from ndtp.planner.hardware import Hardware

    return Hardware.load(job.hardware).peak(job.dtype) * prod(job.grid.values()) * job.stages


def hardware_here(dtype: str) -> str:
    """Return the preset of this machine's GPUs; "" where there are none, or none whose peak in a dtype is known."""
    import torch

    from ndtp.planner.hardware import Hardware
    from ndtp.planner.presets import FABRICS, device_in

    device = device_in(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""
    name = f"{device}-{next(iter(FABRICS))}"
    return name if device and dtype in Hardware.load(name).tflops else ""


def basis_of_mfu(hardware: str, dtype: str) -> str:
    """Return the sentence on what utilisation is a part of.

    Raises:
        GridError: hardware that is not known, or has no such dtype.
    """
    if not hardware:
        return f"{LOG} has no MFU: --hardware tells what the devices could do"
    from ndtp.planner.hardware import Hardware

    return f"MFU in {LOG} is of {Hardware.load(hardware).peak(dtype) / 1e12:g} TFLOP/s a device ({hardware}, {dtype})"


def memory_mib() -> float:
    """The most memory that this rank has had so far: of its device, or else of its process."""
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


class Log:
    """A line a step, in log.csv and, if asked for, for TensorBoard; what was behind the checkpoint is taken out."""

    def __init__(self, job: Job, first: int) -> None:
        self.grid = job.name
        path = job.output / LOG
        before = [row for row in read_log(path) if int(row["step"]) <= first] if first else []
        self.file = path.open("w", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, COLUMNS)
        self.writer.writeheader()
        self.writer.writerows(before)
        self.board: Any = None
        if job.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(job.output / "tensorboard"), purge_step=first + 1)

    def add(
        self,
        step: int,
        loss: float,
        norm: float,
        learning_rate: float,
        speed: float,
        mfu: float | None = None,
        exposed: float | None = None,
        memory: float | None = None,
    ) -> None:
        values = {
            "loss": loss, "gradient_norm": norm, "learning_rate": learning_rate, "tokens_per_second": speed,
            "mfu": mfu, "exposed_communication": exposed, "memory_mib": memory,
        }  # fmt: skip
        known = {name: value for name, value in values.items() if value is not None}
        digits = {"loss": 9}
        row = {name: f"{value:.{digits.get(name, 6)}g}" for name, value in known.items()}
        self.writer.writerow({"step": step, **row, "grid": self.grid})
        self.file.flush()
        if self.board is not None:
            for name, value in known.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_log(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get("step") and row.get("grid")]


def live_table(path: Path) -> object:
    """The last steps of a log as a table, for below a bar of progress; an empty text before there are any."""
    from rich.table import Table

    rows = _last_rows(path)
    if not rows:
        return ""
    table = Table(padding=(0, 1), pad_edge=False)
    headings = {
        "step": "step", "loss": "loss", "gradient_norm": "norm", "tokens_per_second": "tokens/s", "mfu": "MFU",
        "exposed_communication": "exposed", "memory_mib": "MiB",
    }  # fmt: skip
    shown = [name for name in headings if any(row.get(name) for row in rows)]
    for name in shown:
        table.add_column(headings[name], justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_short(name, row.get(name) or "") for name in shown))
    return table


def _short(name: str, text: str) -> str:
    if not text or name == "step":
        return text
    if name in ("mfu", "exposed_communication"):
        return f"{float(text):.1%}"
    return f"{float(text):,.0f}" if name in ("tokens_per_second", "memory_mib") else f"{float(text):.4g}"


def _last_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = [dict(zip(COLUMNS, cells, strict=True)) for cells in csv.reader(lines) if len(cells) == len(COLUMNS)]
    return [row for row in found if row["step"].isdecimal()][-SHOWN_ROWS:]
