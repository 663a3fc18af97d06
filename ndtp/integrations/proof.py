"""How a loss that a Trainer computes outside of the model is combined of ranks with rows of their own: by trial.

Along axes such as `dp` a rank sees its rows alone.  What a `compute_loss` makes of them is a mean over rows, a share of
a sum, the loss of all rows (of a stock model's own), or none of these: a loss that compares rows with each other.  No
name tells which, but the numbers do: the loss of the whole batch, and those of its parts.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from ndtp.errors import LayoutError
from ndtp.integrations.grid_rows import cut_rows, data_axes, number_of_samples, whole
from ndtp.models.data_loss import judged_outside
from ndtp.runtime.process_grid import ProcessGrid

ROUNDING, ROUNDING_OF_16_BITS = 1e-5, 1e-3  # of the loss of all rows against that of its parts
SAME = 1e-6  # of a loss of the same rows, computed again
IGNORED = -100  # labels that do not count
FIX = "z in the place of dp, which splits rows, too, but inside of the model, so that the loss sees the whole batch"
DATA = ("train_dataset", "eval_dataset")  # of a Trainer, which may be long lists
OF_ALL, SUM = "of all rows", "a share of a sum"
# Means, by what is counted: rows, labels, or labels but for the first of each row, which nothing predicts.
MEAN, OF_LABELS, OF_NEXT = "a mean over rows", "a mean over labels", "a mean over labels behind the first of each row"


@dataclass
class Proof:
    """What a loss was found to be, at the steps 1, 2, 4, 8 and so on, and where it could be several things.

    Args:
        name: of what computes the loss, for error texts.
    """

    mesh: ProcessGrid
    name: str
    steps: int = 0
    kinds: tuple[str, ...] = ()  # that it may be, by all that was tried
    shares: dict[str, list[float]] = field(default_factory=dict)  # of the last batch, of each rank, by kind

    @property
    def is_of_all(self) -> bool:
        return self.kinds == (OF_ALL,)

    def share(self) -> float:
        """Return what a rank's loss is multiplied by, so that the gradients that ranks sum are the batch's."""
        if not self.kinds:
            raise self.refusal("was never tried, since the training_step prepares no inputs")
        return self.shares[self.kinds[0]][self.mesh.grid.index(self.mesh.rank, data_axes(self.mesh))]

    def look(self, loss_of: Callable[[Any], float], batch: object, is_cut: bool, rounding: float) -> None:
        """Find out what the loss is, where that is due; a collective.

        Args:
            is_cut: whether ranks have rows of their own of this batch.

        Raises:
            LayoutError: the loss of the batch is not made of those of its parts; the same on every rank.
        """
        self.steps += 1
        size = self.mesh.grid.size(data_axes(self.mesh))
        count = number_of_samples(batch)
        if not self.kinds and count < size:
            raise self.refusal(f"cannot be tried on {count} rows of {size} ranks")
        self.shares = (
            shares_of(batch, count, size)
            if is_cut
            else dict.fromkeys((MEAN, SUM, OF_LABELS, OF_NEXT), [1 / size] * size)
        )
        self.shares |= {OF_ALL: [1.0] * size}
        if (self.steps & (self.steps - 1) == 0 or not self._is_told()) and count >= size:
            self._narrow(self._tried(loss_of, batch, count, rounding))
            if not self._is_told() and (probe := uneven_labels(batch, count, size)) is not None:
                self._narrow(self._tried(loss_of, probe, count, rounding))
        if not self._is_told():
            raise self.refusal(f"may be {' or '.join(self.kinds)}, which are other numbers at step {self.steps}")

    def _narrow(self, kinds: tuple[str, ...]) -> None:
        """Keep, of what the loss may be, what a trial has found."""
        left = tuple(kind for kind in self.kinds or kinds if kind in kinds)
        if not left:
            raise self.refusal(f"was {self.kinds[0]}, and is {kinds[0]} at step {self.steps}")
        self.kinds = left

    def _is_told(self) -> bool:
        """Return whether all that the loss may be has ranks' losses combined alike."""
        first, *others = [self.shares.get(kind) for kind in self.kinds] or [None]
        return first is not None and all(each == first for each in others)

    def _tried(self, loss_of: Callable[[Any], float], batch: Any, count: int, rounding: float) -> tuple[str, ...]:
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
        return self._judged(total, parts, again, rounding, shares_of(batch, count, size))

    def _judged(
        self, total: float, parts: list[float], again: float, rounding: float, shares: Mapping[str, Sequence[float]]
    ) -> tuple[str, ...]:
        """Return the kinds that a loss may be: of all rows, of each rank's, and of the first's where others have its
        rows.
        """
        scale = max(abs(total), *map(abs, parts))
        combined = {
            kind: sum(share * part for share, part in zip(each, parts, strict=True) if share)
            for kind, each in shares.items()
        }

        def near(a: float, b: float, within: float = rounding) -> bool:
            return abs(a - b) <= within * scale

        is_alone = near(parts[0], again, SAME)  # else it depends on the rows of others
        if is_alone and (near(min(parts), max(parts), SAME) or near(combined[MEAN], combined[SUM])):
            raise self.refusal(f"is {total + 0.0:.6g} of any rows, which does not tell whether it is that of all rows")
        found = tuple(kind for kind, each in combined.items() if near(each, total))
        if is_alone and found:
            return found
        if not is_alone and all(near(part, total) for part in parts):
            return (OF_ALL,)
        listed = ", ".join(f"{part:.6g}" for part in parts)
        raise self.refusal(
            f"is {total:.6g} of the whole batch, and {combined[MEAN]:.6g} in the mean of ranks with their rows alone "
            f"({listed})"
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

    def refusal(self, what: str) -> LayoutError:
        """Return the error that says what the loss is."""
        axes = " ".join(data_axes(self.mesh))
        return LayoutError(f"Trainer: along {axes}, {self.name} {what}\n  fix: {FIX}")


def uneven_labels(batch: object, count: int, size: int) -> object | None:
    """Return a batch of which few labels count, so that each kind of mean is another number; None if it has no labels.

    Every other rank has one of them; those between have three, the first of a row among these.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.shape[1] < 3 or len(labels) != count:
        return None
    counted = labels[labels != IGNORED]
    if labels.is_floating_point() or not len(counted):
        return None
    few, rows = torch.full_like(labels, IGNORED), count // size
    few[: rows * size : rows, 1] = counted[0]
    few[rows : rows * size : 2 * rows, :3] = counted[0]
    assert isinstance(batch, Mapping)
    return type(batch)({**batch, "labels": few})  # type: ignore[call-arg]


def shares_of(batch: object, count: int, size: int) -> dict[str, list[float]]:
    """Return, by the kinds of losses of rows, the part that each rank's loss has in that of all.

    Args:
        count: of rows.
        size: the number of ranks.
    """
    found = {MEAN: [1 / size] * size, SUM: [1.0] * size}
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim() or len(labels) != count:
        return found
    counts = (labels[: count // size * size] != IGNORED).reshape(size, count // size, -1)
    for kind, each in ((OF_LABELS, counts), (OF_NEXT, counts[:, :, 1:])):
        counted = each.sum((1, 2)).double()
        if bool(counted.all()) and counted.numel():
            found[kind] = (counted / counted.sum()).tolist()
    return found


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
def proved_outside(proof: Proof | None) -> Iterator[None]:
    """Leave a Trainer's own loss to its proof, and say in a model's refusal what helps users of that Trainer."""
    try:
        with nullcontext() if proof is None else judged_outside():
            yield
    except LayoutError as error:
        if proof is None or FIX in str(error):
            raise
        raise LayoutError(f"{error}; or {FIX}") from error


def loss_of(trainer: Any, model: nn.Module, inputs: Any, num_items: Any) -> float:
    """The number that a Trainer's `compute_loss` is of these rows."""
    with leaving_no_trace(trainer, model), judged_outside(), trainer.compute_loss_context_manager():
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
