"""The layout of one model's activations: the facts that they share, and each one's own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.models.fused_order import order_of
from ndtp.runtime.of_turn import OfTurn
from ndtp.runtime.process_grid import ProcessGrid


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
        has_split_loss: whether a loss was taken of logits that are split: it is that of all sequences.
        losses: plans of a head with its loss, by what these depend on.
    """

    mesh: ProcessGrid
    outside: Layout
    sequences: int
    gathered: dict[str, int] = field(default_factory=dict)
    fuse: bool = True
    loss_rows: int = 1024
    head: Any = None
    activations: dict[Any, Any] = field(default_factory=dict)
    losses: dict[Any, Any] = field(default_factory=dict)
    running = OfTurn(list)
    has_labels = OfTurn(bool)
    has_split_loss = OfTurn(bool)

    def note(self, who: str, passage: Passage) -> None:
        """Note that an operation takes the whole of a split tensor, and warn the first time."""
        key = f"{who} of what '{passage.came_from}' gave"
        if key not in self.gathered and passage.loud:
            warnings.warn(
                f"ndtp: {who} takes the whole {passage}, from '{passage.came_from}', which is gathered for it",
                stacklevel=5,
            )
        self.gathered[key] = self.gathered.get(key, 0) + 1

    def padded(self, count: int) -> int:
        return -(-count // self.sequences) * self.sequences

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
    came_from: str = field(default="", compare=False)
    loud: bool = field(default=True, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.features)

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
        frame = self.frame
        inner = self.layout.dims[0][len(frame.outside.dims[0]) :]
        count = self.rows // frame.splits(self.layout)
        start = frame.mesh.grid.index(frame.mesh.rank, inner) * count
        return range(start, start + count)

    def __str__(self) -> str:
        return f"{self.shape} as [{self.layout.label('MK')}]"
