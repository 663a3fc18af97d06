"""The program of `ndtp train` on every rank: the model, its batches, the loop, checkpoints and logs."""

from __future__ import annotations

import contextlib
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import TENSOR_AXES
from ndtp.checkpoints.training_state import Saving, load, start_save
from ndtp.cli.demo_training import text as help_topics
from ndtp.cli.job import Job
from ndtp.cli.resuming import begun_with, check_begun, kept_in
from ndtp.cli.train_data import OtherRunError, PackedBatches, check_same
from ndtp.cli.train_log import Log, StepMeter, memory_mib
from ndtp.collectives.labels import Label
from ndtp.collectives.watch import Watch
from ndtp.errors import CheckpointError
from ndtp.models.byte_model import ByteModel
from ndtp.models.parallelize import parallelize
from ndtp.nn.gradients import clip_grad_norm_
from ndtp.runtime.captured import capture
from ndtp.runtime.process_grid import ProcessGrid

if TYPE_CHECKING:
    from ndtp.cli.progress import Counter

CHECKPOINT = "checkpoint"
STOP = 2  # of what a rank says after a step: to stop; 1 that it writes still
WARM_STEPS = 20  # then constant: a run that goes on is the one that was not interrupted
HELD_OUT, HELD_OUT_BATCHES = 0.05, 4  # the last part of the text, and how much of it is looked at


@dataclass
class Trained:
    """The record of one rank's training. `step` is the number of steps done, earlier runs included."""

    first: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: float = float("nan")
    tokens_per_second: float = 0.0
    stopped: bool = False
    error: str = ""
    option: str = ""  # of the command, which the error is about
    sample: str = ""


@contextlib.contextmanager
def _heeding(stop_file: Path) -> Iterator[None]:
    """SIGTERM to this rank itself leaves the mark to stop: Slurm and systemd send it to every process of a job."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the command heeds it: torchrun started this process
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: stop_file.touch())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def has_checkpoint(output: Path) -> bool:
    return any((output / name).exists() for name in (CHECKPOINT, f"{CHECKPOINT}.before"))


def train(counter: Counter, job: Job) -> Trained:
    """Go on from the checkpoint in the output folder, if there is one; stop at the end, on Ctrl-C or SIGTERM."""
    with _heeding(job.stop_file):
        return _train(counter, job)


def _train(counter: Counter, job: Job) -> Trained:
    model: Any
    if job.stages > 1:
        from ndtp.cli.staged_training import StagedModel

        model = StagedModel(job)
    else:
        model = Model(job)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=job.learning_rate)
    done = Trained()
    batches: Any = Batches(job) if job.tokens is None else PackedBatches(job)
    if has_checkpoint(job.output):
        try:
            done.first = done.step = _resume(model, optimizer, batches, job)
        except CheckpointError as error:
            done.error, done.option = str(error), getattr(error, "option", "--output")
            return done
    counter.advance(done.first)
    meter = StepMeter(job, model.mesh)
    take_step = captured_step(model, optimizer, job) if job.capture else eager_step(model, optimizer, job)
    log = Log(job, done.first) if model.rank == 0 else None
    began = time.perf_counter()
    saved = done.first
    saving: Saving | None = None  # a checkpoint that is being written beside the steps
    while done.step < job.steps and not done.stopped:
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * min((done.step + 1) / WARM_STEPS, 1.0)
        with meter.step():
            loss, norm = take_step(batches.at(done.step))
        done.losses.append(loss)
        done.step += 1
        if log is not None:
            speed, rate = batches.tokens / meter.seconds, optimizer.param_groups[0]["lr"]
            log.add(done.step, loss, norm, rate, speed, meter.mfu, meter.exposed, memory_mib())
        counter.advance()
        is_writing = saving is not None and not saving.is_written
        most = model.most_of_ranks(STOP if job.stop_file.exists() else int(is_writing))
        done.stopped = most == STOP
        is_due = done.step == job.steps or done.stopped or done.step - saved >= job.save_every
        if saving is not None and (is_due or not most):  # all ranks have written, or wait for it
            saving.wait()
            saving = None
        if is_due:
            state = {"step": done.step, "run": begun_with(job), **batches.state(done.step)}
            saving = model.save(optimizer, job.output / CHECKPOINT, state)
            saved = done.step
    if saving is not None:
        saving.wait()
    done.tokens_per_second = len(done.losses) * batches.tokens / max(time.perf_counter() - began, 1e-9)
    if not done.stopped:
        done.held_out = _held_out(model, batches)
        if job.sample:
            from ndtp.cli.train_sample import sample

            done.sample = sample(model, job)
    if log is not None:
        log.close()
    return done


def _resume(model: Any, optimizer: torch.optim.Optimizer, batches: Any, job: Job) -> int:
    """Take what the checkpoint in the output folder has; return the number of steps done.

    Raises:
        CheckpointError: it is damaged, or of another model.
        OtherRunError: it is of a run with another model, seed or data.
    """
    try:
        state = model.load(optimizer, job.output / CHECKPOINT)
    except CheckpointError:
        check_begun(kept_in(job.output / CHECKPOINT), job)  # which names the option, as shapes of tensors do not
        raise
    check_begun(state, job)
    batches.resume(state)
    return int(state["step"])


def eager_step(model: Any, optimizer: torch.optim.Optimizer, job: Job) -> Callable[[Tensor], tuple[float, float]]:
    """Return a step of training: from a batch to its loss and the norm of its gradients."""

    def step(batch: Tensor) -> tuple[float, float]:
        loss = model.step(batch)
        norm = model.clip(job.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return step


def captured_step(model: Model, optimizer: torch.optim.Optimizer, job: Job) -> Callable[[Tensor], tuple[float, float]]:
    """Return a step of training that runs as one CUDA graph, see `ndtp.capture`."""
    device = next(model.module.parameters()).device

    def whole(batch: Tensor) -> tuple[Tensor, Tensor]:
        loss = model.loss(batch)
        loss.backward()
        norm = clip_grad_norm_(model.module.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    captured = capture(whole, torch.empty(job.batch, job.context + 1, dtype=torch.int64, device=device))

    def step(batch: Tensor) -> tuple[float, float]:
        loss, norm = captured(batch.to(device))
        return loss.item(), norm.item()

    return step


class Model:
    """A model on a grid or on none, and its loss of whole batches, which every rank has."""

    def __init__(self, job: Job) -> None:
        self.mesh = mesh = ProcessGrid(Grid(job.grid), wire=job.wire) if job.grid else None
        torch.manual_seed(job.seed)
        device = "cpu" if mesh is None else mesh.device_type
        dtype = getattr(torch, job.dtype)
        self.rows: Layout | None = None
        self.rank = 0 if mesh is None else mesh.rank
        if job.config is None:
            byte_model = ByteModel(job.sizes).to(device, dtype)
            self.module: nn.Module = byte_model if mesh is None else byte_model.to_grid(mesh, job.scheme, job.chunks)
            self.is_ours = True
            return
        self.is_ours = False
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.config)).to(device, dtype)
        if mesh is not None:
            model = parallelize(model, mesh, scheme=job.scheme, chunks=job.chunks)
            data = tuple(axis for axis in mesh.grid if axis not in TENSOR_AXES)
            self.rows = Layout(mesh.grid, data)
        self.module = model

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss of [sequences, context + 1] bytes over all but the first byte of each sequence."""
        batch = batch.to(next(self.module.parameters()).device)
        if self.is_ours:
            return self.module(batch[:, :-1], batch[:, 1:])
        if self.rows is not None:
            batch = batch[self.rows.slices(self.rank, (len(batch),))[0]]
        return self.module(input_ids=batch, labels=batch).loss

    def step(self, batch: Tensor) -> float:
        """Gradients of a batch, and its loss."""
        loss = self.loss(batch)
        loss.backward()
        return loss.item()

    def loss_of(self, batch: Tensor) -> float:
        return self.loss(batch).item()

    def clip(self, max_norm: float) -> float:
        return float(clip_grad_norm_(self.module.parameters(), max_norm))

    def save(self, optimizer: torch.optim.Optimizer, folder: Path, extra: Mapping[str, object]) -> Saving:
        return start_save(self.module, optimizer, folder, extra=extra, chunks=True)

    def load(self, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
        return load(self.module, optimizer, folder)

    def most_of_ranks(self, mine: int) -> int:
        """Return the largest of what ranks say, so that all of them stop at the same step."""
        mesh = self.mesh
        if mesh is None or mesh.grid.num_ranks == 1:
            return mine
        flag = torch.tensor(mine, device=mesh.device_type)
        axes = mesh.grid.nontrivial(mesh.grid.names)
        label = Label(("request to stop",), "forward", "all_reduce", axes)
        with Watch(mesh.describe, label, mesh.groups.members(axes)):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.groups.group(axes))
        return int(flag)


class Batches:
    """Random parts of a text; those of a step are the same on every grid, and after an interruption."""

    def __init__(self, job: Job) -> None:
        if job.text is None:
            whole = help_topics()
        else:
            whole = torch.frombuffer(bytearray(job.text.read_bytes()), dtype=torch.uint8)
        cut = len(whole) - max(int(len(whole) * HELD_OUT), job.context + 1)
        self.text, self.held_out_text = whole[:cut], whole[cut:]
        self.batch, self.context, self.seed = job.batch, job.context, job.seed
        self._of_text = {"bytes": len(whole), "hash of the text": zlib.crc32(whole.numpy().data)}

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    def resume(self, state: Mapping[str, Any]) -> None:
        """No position is to be kept: the batch of a step follows from the text, the seed and its number.

        Raises:
            OtherRunError: the run has drawn sequences of a data set, each once, or has learned another text.
        """
        if "sequences" in state:
            raise OtherRunError("--data", "the run has drawn its sequences from --data, and there is none now")
        before = state.get("text", self._of_text)  # older ones do not tell
        check_same("the run has learned another text:", before, self._of_text, {"": "FILE"})

    def state(self, step: int) -> dict[str, Any]:
        return {"text": self._of_text}

    def held_out(self, number: int) -> Tensor:
        return self.at(number, self.held_out_text)

    def at(self, step: int, text: Tensor | None = None) -> Tensor:
        text = self.text if text is None else text
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - self.context, (self.batch, 1), generator=draw)
        return text[starts + torch.arange(self.context + 1)].long()


def least_bytes(context: int) -> int:
    """Return the least bytes of a text: a sequence to learn from, and one that is held out."""
    return 2 * (context + 2)


@torch.no_grad()
def _held_out(model: Any, batches: Any) -> float:
    model.module.eval()
    losses = [model.loss_of(batches.held_out(i)) for i in range(HELD_OUT_BATCHES)]
    model.module.train()
    return sum(losses) / len(losses)
