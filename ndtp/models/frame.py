"""The layout of one model's activations: the facts that they share, and each one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.collectives.turns import TURN
from ndtp.errors import warn
from ndtp.models.fused_order import order_of
from ndtp.models.whole_gains import Gains
from ndtp.runtime.of_turn import OfTurn
from ndtp.runtime.process_grid import ProcessGrid

MOST_RANGES = 1024


def dropouts_of(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, nn.modules.dropout._DropoutNd)]


def led_to(layer: Any, given: Passage, make: Callable[[Passage], Passage]) -> Passage:
    """Return how what a layer gives lies, for an input that lies as `given`; made once while inputs lie alike."""
    last = vars(layer).get("ndtp_led_to")
    if last is None or last[0] is not given:
        last = vars(layer)["ndtp_led_to"] = (given, make(given))
    return last[1]  # type: ignore[no-any-return]


@dataclass(eq=False)
class Frame:
    """The facts that all split activations of one model share.

    Attributes:
        outside: the layout of whole activations, [rows, features]: rows split over `dp` alone.
        sequences: the number of sequences (of one dp rank) is padded to a multiple of this.
        gathered: operations that took the whole of a split activation, and how often.
        running: the parameters that forwards of modules left as they are have read, one forward inside of the other.
        fuse: whether products run as one with what they lead to: those of an MLP, and the head with its loss.
        loss_rows: the most rows of logits that a rank has at a time, where a loss is all that they are for.
        head, has_labels: the projection that gives logits, and whether the model was called with labels.
        activations: those that formulas of the model's code were found to be, by their keys.
        split_losses: losses of this forward that are those of all sequences, though `dp` splits these.
        losses: plans of a head with its loss, by what these depend on.
        cuts_sequences: whether a batch that the ranks do not divide is split by the tokens of its sequences; else it is
            padded with sequences that count for nothing.
        always_cuts: whether one that they divide is, too: that of a stage, where ranks of another stage do not.
        attention: as of `ndtp.split.spec.Context`.
        summed: the axes over which the code that runs has its gradients summed already: that of split tensors.
        trials: dtypes of what functions give of activations that are still to be computed, by their formulas.
        writes: as of `ndtp.split.spec.Context`.
        shared: what keeps results of several layers for those that have not asked for theirs, by its identity; `forget`
            lets them go.
        gains: of norms, as wholes.
        dropouts: of the model, None before its first forward.
        is_in_forward, generates: whether the model's forward runs, and whether its `generate` does.
        may_decode: whether the one that runs may have few rows that are whole, if it has no gradients and no autocast.
        draws: whether some of them are on, though the model is not in training: they have one mask for the whole.
        whole: how activations with whole rows lie, by their sizes, see `ndtp.models.whole_rows`.
        ranges: the rows of a rank, by a layout's identity (the layout stands beside them) and the number of rows.
    """

    mesh: ProcessGrid
    outside: Layout
    sequences: int
    gathered: dict[str, int] = field(default_factory=dict)
    fuse: bool = True
    loss_rows: int = 1024
    cuts_sequences: bool = False
    always_cuts: bool = False
    attention: str = "auto"
    head: Any = None
    activations: dict[Any, Any] = field(default_factory=dict)
    losses: dict[Any, Any] = field(default_factory=dict)
    trials: dict[Any, Any] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    whole: dict[tuple[int, ...], Passage] = field(default_factory=dict)
    dropouts: list[nn.Module] | None = None
    ranges: dict[tuple[int, int], tuple[Layout, range]] = field(default_factory=dict)
    running = OfTurn(list)
    has_labels = OfTurn(bool)
    split_losses = OfTurn(list)
    summed = OfTurn(tuple)
    shared = OfTurn(dict)

    draws = OfTurn(bool)
    is_in_forward = OfTurn(bool)
    may_decode = OfTurn(bool)
    generates = OfTurn(bool)

    def __post_init__(self) -> None:
        self.gains = Gains(self.mesh)

    def begin(self, model: nn.Module) -> None:
        """Begin a forward of the model."""
        self.gains.begin()
        if not self.running:
            self.split_losses = []
        if self.dropouts is None:
            self.dropouts = dropouts_of(model)
        self.draws = any(each.training for each in self.dropouts)
        mesh = self.mesh
        may_decode = not (self.draws or self.always_cuts or mesh.check or torch.compiler.is_compiling())
        self.may_decode = may_decode and mesh.collectives.wire is None
        self.is_in_forward = True

    def decodes(self) -> bool:
        """Return whether a forward of the model runs now in which few rows are whole; False under turns as well."""
        return (
            TURN.get() is None
            and self.__dict__.get("may_decode", False)
            and not torch.is_grad_enabled()
            and not torch._C._is_any_autocast_enabled()
        )

    def end(self) -> None:
        """End a forward of the model."""
        self.gains.begin()
        self.is_in_forward = self.may_decode = False

    def forget_shared(self) -> None:
        """Let go of results that were computed with others and that nobody has asked for, and of their graphs."""
        waiting, self.shared = self.shared, {}
        for each in waiting.values():
            each.forget()

    def note_loss(self, loss: Tensor) -> Tensor:
        """Note that a loss is that of all sequences, and return it as one to which code may add others in place."""
        is_models = self.running or self.has_labels  # the latter alone where the program around the model is compiled
        if not is_models or not self.mesh.grid.nontrivial(self.outside.dims[0]):
            return loss
        self.split_losses.append(loss)
        return loss.clone()

    def note(self, who: str, passage: Passage) -> None:
        """Note that an operation takes the whole of a split tensor, and warn the first time."""
        key = f"{who} of what '{passage.came_from}' gave"
        if key not in self.gathered and passage.loud:
            warn(f"ndtp: {who} takes the whole {passage}, from '{passage.came_from}', which is gathered for it")
        self.gathered[key] = self.gathered.get(key, 0) + 1

    def padded(self, count: int) -> int:
        return -(-count // self.sequences) * self.sequences

    def rows_of(self, lead: Sequence[int]) -> tuple[int, int]:
        """Return the rows of an activation with these leading dims, padding included, and its `Passage.across`."""
        count, each = lead[0] if lead else 1, math.prod(lead[1:])  # a vector is one row
        if self.cuts_sequences and len(lead) > 1 and (count % self.sequences or self.always_cuts):
            return self.padded(each) * count, count
        return self.padded(count) * each, 0

    def splits(self, layout: Layout) -> int:
        """Return the number of parts into which the rows of one dp rank are split."""
        return layout.num_splits(0) // self.outside.num_splits(0)


@dataclass(frozen=True)
class Passage:
    """The layout of one activation.

    Attributes:
        layout: of [rows, features].
        lead: the leading dims of the whole.
        rows: their product, with the rows of padding behind them.
        features, width: without padding, and with it.
        across: 0 where rows are in the order of the leading dims; else the size of the first of these, which comes last
            in the order of rows, so that ranks have tokens of every sequence.
        sections: the features are so many parts one after the other, each of which is split by itself.
        came_from: what gave it.
        loud: whether it is worth a word when it is gathered.
    """

    frame: Frame
    layout: Layout
    lead: tuple[int, ...]
    rows: int
    features: int
    width: int
    sections: int = 1
    across: int = 0
    came_from: str = field(default="", compare=False)
    loud: bool = field(default=True, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.features)

    def is_like(self, other: Passage) -> bool:
        """Return whether another activation lies as this one does; of two that have been compared it is known."""
        if other is self or other.__dict__.get("_like") is self:
            return True
        if other != self:
            return False
        other.__dict__["_like"] = self
        return True

    @property
    def order(self) -> Tensor | None:
        """Return the order in which shards in a row have features of several sections; None where it is the dense
        order.
        """
        count = self.sections
        return None if count == 1 else order_of([self.features // count] * count, self.layout.num_splits(1))

    @property
    def rows_here(self) -> range:
        """Return the rows of its dp rank that this rank has."""
        ranges, key = self.frame.ranges, (id(self.layout), self.rows)
        if key not in ranges:
            if len(ranges) >= MOST_RANGES:
                ranges.clear()
            ranges[key] = self.layout, self._rows_here()
        return ranges[key][1]

    def _rows_here(self) -> range:
        frame = self.frame
        inner = self.layout.dims[0][len(frame.outside.dims[0]) :]
        count = self.rows // frame.splits(self.layout)
        start = frame.mesh.grid.index(frame.mesh.rank, inner) * count
        return range(start, start + count)

    def index_of(self, rows: Tensor) -> Tensor:
        """Return the index of each of these rows in the order of the leading dims; the last one's for padding."""
        real = math.prod(self.lead)
        rows = rows.clamp(max=real - 1)
        return rows if self.across < 2 else rows % self.across * (real // self.across) + rows // self.across

    def row_of(self, index: Tensor) -> Tensor:
        """Return the row of each of these indices in the order of the leading dims."""
        each = math.prod(self.lead) // max(self.across, 1)
        return index if self.across < 2 else index % each * self.across + index // each

    def in_order(self, rows: Tensor) -> Tensor:
        """Return all rows [rows, ..] in the order of the leading dims, without padding."""
        rows = rows[: math.prod(self.lead)]
        if self.across < 2 or not len(rows):
            return rows
        return rows.unflatten(0, (-1, self.across)).transpose(0, 1).flatten(0, 1)

    def laid(self, x: Tensor, value: float = 0) -> Tensor:
        """Return what is in the order of the leading dims, [n, ..], as all rows, with padding of this value."""
        if self.across > 1 and len(x):
            x = x.unflatten(0, (self.across, -1)).transpose(0, 1).flatten(0, 1)
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, self.rows - len(x)), value=value)

    def __str__(self) -> str:
        return f"{self.shape} as [{self.layout.label('MK')}]"
