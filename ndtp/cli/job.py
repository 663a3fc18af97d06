"""`Job`: what `ndtp train` is to do, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ndtp.algebra.wire import Wire
from ndtp.models.byte_model import ByteModelSizes


@dataclass(frozen=True)
class Job:
    """A training run: the same on every rank.

    Attributes:
        text: the file, or None for the help topics of Python's standard library.
        config: of a model of transformers (config.json), or None for the byte-level model of `sizes`.
        grid: sizes of the axes; empty trains the dense model on one rank.
        context: bytes of a sequence.
        batch: sequences a step, of all ranks.
        save_every: steps between checkpoints; there is one at the end in any case.
        stop_file: where Ctrl-C leaves a mark for the ranks.
        tokens: a file of packed tokens that takes the place of `text`; see `ndtp.cli.train_data`.
        tokenizer: turns these into text; None: they are bytes.
        hardware: a preset or profile of the planner, by which utilisation (MFU) is measured; "" for none.
        sample, prompt: how many tokens are made at the end, and what they follow.
        wire: the dtypes in which tensors travel between ranks.
        stages, micro_batches: into how many the model and each batch are cut; each stage is on a grid of its own.
    """

    output: Path
    stop_file: Path
    text: Path | None
    config: Path | None
    sizes: ByteModelSizes
    grid: Mapping[str, int]
    scheme: str
    steps: int
    batch: int
    context: int
    learning_rate: float
    clip: float
    seed: int
    save_every: int
    chunks: int | str
    dtype: str
    tensorboard: bool
    stages: int = 1
    micro_batches: int = 1
    tokens: Path | None = None
    tokenizer: Path | None = None
    hardware: str = ""
    sample: int = 0
    prompt: str = ""
    wire: Wire | None = None
    capture: bool = False

    @property
    def name(self) -> str:
        """Return the name of the place where the job runs."""
        grid = " ".join(f"{axis}={size}" for axis, size in self.grid.items())
        return f"{self.stages} stages of {grid or 'x=1'}" if self.stages > 1 else grid or "dense"
