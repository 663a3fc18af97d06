"""How a loss that a Trainer computes outside of the model is combined of ranks with rows of their own: by trial.

Along axes such as `dp` a rank sees its rows alone.  What a `compute_loss` makes of them is a mean over rows, a share of
a sum, the loss of all rows (of a stock model's own), or none of these: a loss that compares rows with each other.  No
name tells which, but the numbers do: the loss of the whole batch, and those of its parts.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from ndtp.errors import LayoutError
from ndtp.integrations.one_program import cut_rows, data_axes, number_of_samples, whole
from ndtp.runtime.process_grid import ProcessGrid

ROUNDING, ROUNDING_OF_16_BITS = 1e-5, 1e-3  # of the loss of all rows against that of its parts
SAME = 1e-6  # of a loss of the same rows, computed again
IGNORED = -100  # labels that do not count
FIX = "z in the place of dp, which splits rows, too, but inside of the model, so that the loss sees the whole batch"
DATA = ("train_dataset", "eval_dataset")  # of a Trainer, which may be long lists
OF_ALL, MEAN, SUM = "of all rows", "a mean over rows", "a share of a sum"


@dataclass
class Proof:
    """What a loss was found to be, at the steps 1, 2, 4, 8 and so on.

    Args:
        name: of what computes the loss, for error texts.
    """

    mesh: ProcessGrid
    name: str
    steps: int = 0
    kind: str | None = None
    is_cut: bool = True  # whether ranks have rows of their own of the last batch

    def share(self) -> float:
        """Return what a rank's loss is multiplied by, so that the gradients that ranks sum are the batch's."""
        if self.kind is None:
            raise self.refusal("was never tried, since the training_step prepares no inputs")
        if self.kind == OF_ALL or (self.kind == SUM and self.is_cut):
            return 1.0
        return 1.0 / self.mesh.grid.size(data_axes(self.mesh))

    def look(self, loss_of: Callable[[Any], float], batch: object, is_cut: bool, rounding: float) -> None:
        """Find out what the loss is, where that is due; a collective.

        Raises:
            LayoutError: the loss of the batch is not made of those of its parts; the same on every rank.
        """
        self.is_cut, self.steps = is_cut, self.steps + 1
        size = self.mesh.grid.size(data_axes(self.mesh))
        count = number_of_samples(batch)
        if self.kind is None and count < size:
            raise self.refusal(f"cannot be tried on {count} rows of {size} ranks")
        if self.steps & (self.steps - 1) == 0 and count >= size:
            kind = self._tried(loss_of, batch, count, rounding)
            if self.kind not in (None, kind):
                raise self.refusal(f"was {self.kind}, and is {kind} at step {self.steps}")
            self.kind = kind
        if self.kind == MEAN and is_cut:
            self._refuse_uneven_labels(batch, count, size)

    def _tried(self, loss_of: Callable[[Any], float], batch: Any, count: int, rounding: float) -> str:
        mesh, axes = self.mesh, data_axes(self.mesh)
        size = mesh.grid.size(axes)
        rows = count // size
        mine = mesh.grid.index(mesh.rank, axes) * rows
        values = [
            self._of_every_rank(loss_of, cut_rows(batch, part, count), of)
            for part, of in (
                (slice(0, rows * size), "all rows"),
                (slice(mine, mine + rows), "this rank's rows"),
                (slice(0, rows), "the first rank's rows"),
            )
        ]
        total, parts, again = values[0][0], values[1], values[2][0]
        return self._judged(total, parts, again, rounding)

    def _judged(self, total: float, parts: list[float], again: float, rounding: float) -> str:
        """Return the kind of a loss: of all rows, of each rank's, and of the first's where others have its rows."""
        scale = max(abs(total), *map(abs, parts))
        mean, added = sum(parts) / len(parts), sum(parts)

        def near(a: float, b: float, within: float = rounding) -> bool:
            return abs(a - b) <= within * scale

        is_alone = near(parts[0], again, SAME)  # else it depends on the rows of others
        if is_alone and (near(min(parts), max(parts), SAME) or near(mean, added)):
            raise self.refusal(f"is {total + 0.0:.6g} of any rows, which does not tell whether it is that of all rows")
        if is_alone and near(mean, total):
            return MEAN
        if is_alone and near(added, total):
            return SUM
        if not is_alone and all(near(part, total) for part in parts):
            return OF_ALL
        listed = ", ".join(f"{part:.6g}" for part in parts)
        raise self.refusal(
            f"is {total:.6g} of the whole batch, and {mean:.6g} in the mean of ranks with their rows alone ({listed})"
        )

    def _of_every_rank(self, loss_of: Callable[[Any], float], rows: Any, of: str) -> list[float]:
        """Return the losses of ranks with other rows; a collective."""
        mesh = self.mesh
        try:
            found = loss_of(rows)
        except Exception as error:
            said = str(error).partition("\n  fix: ")[0]
            raise self.refusal(f"of {of} ends in {type(error).__name__}: {said}") from error
        every: list[Any] = [None] * mesh.grid.num_ranks
        mine = (mesh.grid.index(mesh.rank, data_axes(mesh)), mesh.rank, found)
        dist.all_gather_object(every, mine, group=mesh.group(mesh.grid.nontrivial(mesh.grid.names)))
        first = {place: loss for place, _, loss in sorted(every, reverse=True)}  # of ranks with the same rows
        return [first[place] for place in sorted(first)]

    def _refuse_uneven_labels(self, batch: object, count: int, size: int) -> None:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or len(labels) != count:
            return
        counted = (labels != IGNORED).reshape(size, -1).sum(1).tolist()
        if len(set(counted)) > 1:
            raise self.refusal(f"is a mean over the rows of a rank, of which other numbers of labels count: {counted}")

    def refusal(self, what: str) -> LayoutError:
        """Return the error that says what the loss is."""
        axes = " ".join(data_axes(self.mesh))
        return LayoutError(f"Trainer: along {axes}, {self.name} {what}\n  fix: {FIX}")


@contextmanager
def leaving_no_trace(trainer: object, model: nn.Module) -> Iterator[None]:
    """Compute losses without gradients and dropout: random numbers, modes and what a Trainer counts are as before."""
    modes = [(module, module.training) for module in model.modules()]
    counted = {
        name: copy.deepcopy(value) for name, value in vars(trainer).items() if name not in DATA and _is_plain(value)
    }
    numbers, of_numpy = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        random.setstate(numbers)
        numpy.random.set_state(of_numpy)
        for module, mode in modes:
            module.training = mode
        vars(trainer).update(counted)


@contextmanager
def naming_the_fix(proof: Proof | None) -> Iterator[None]:
    """Say, where a model refuses what a Trainer's own loss asks of it, what helps who does not write that Trainer."""
    try:
        yield
    except LayoutError as error:
        if proof is None or FIX in str(error):
            raise
        raise LayoutError(f"{error}; or {FIX}") from error


def loss_of(trainer: Any, model: nn.Module, inputs: Any, num_items: Any) -> float:
    """The number that a Trainer's `compute_loss` is of these rows."""
    with leaving_no_trace(trainer, model), trainer.compute_loss_context_manager():
        return float(whole(trainer.compute_loss(model, inputs, num_items_in_batch=num_items)))


def rounding_of(trainer: Any, model: nn.Module) -> float:
    """How far the loss of a batch may be from that of its parts."""
    is_short = any(p.is_floating_point() and p.itemsize < torch.float32.itemsize for p in model.parameters())
    return ROUNDING_OF_16_BITS if is_short or trainer.args.bf16 or trainer.args.fp16 else ROUNDING


def refuse_sums_of_steps(trainer: Any, proof: Proof, batch: object) -> None:
    """Refuse to accumulate a loss that the Trainer of a dense model adds up, and that of a model with `dp` averages.

    Raises:
        LayoutError: a `compute_loss` that does not say whether it is scaled for accumulation.
    """
    says = getattr(trainer, "loss_is_scaled_for_ga", None) is not None
    if says or trainer.args.gradient_accumulation_steps == 1 or trainer.model_accepts_loss_kwargs:
        return
    base = trainer.model.get_base_model() if hasattr(type(trainer.model), "get_base_model") else trainer.model
    parameters = inspect.signature(type(base).forward).parameters.values()
    accepts = getattr(type(base), "accepts_loss_kwargs", any(p.kind is p.VAR_KEYWORD for p in parameters))
    is_own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
    if is_own and accepts and isinstance(batch, Mapping) and "labels" in batch:
        error = proof.refusal("does not say whether it is scaled for gradient accumulation, and is averaged over steps")
        raise LayoutError(f"{error}; or loss_is_scaled_for_ga=False of the Trainer's class, for a mean over a batch")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value).__module__ in ("builtins", "collections") and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
