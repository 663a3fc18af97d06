"""`Splits`: many ways to share one training step among ranks, as arrays.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from ndtp.planner.grids import Grids, PerGrid
from ndtp.planner.hardware import Hardware
from ndtp.planner.time_model import Network

# Axes of a training step; all but pp, cp are those of `Grids`.
STEP_AXES = ("pp", "dp", "e", "z", "cp", "x", "y")

# Axes on the ranks, slowest first.  Inside of a node lie tensor parallel ranks, then context and experts.
RANK_ORDERS = (
    ("pp", "dp", "z", "e", "cp", "x", "y"),
    ("pp", "dp", "e", "cp", "z", "x", "y"),
    ("dp", "pp", "z", "e", "cp", "x", "y"),
    ("pp", "dp", "e", "cp", "x", "y", "z"),
    ("pp", "dp", "e", "cp", "y", "z", "x"),
)


@dataclass(frozen=True)
class Splits:
    """Sizes of axes, the sequences of a micro-batch and the parts of the model on a stage: arrays of one shape, or
    numbers.

    Attributes:
        e: data parallel but for experts, which it splits.
        micro: sequences that the ranks along x, y and cp work on together at a time.
        virtual: parts of the model that a stage holds, by turns (interleaved 1F1B).
        fold: which of z, x and y split experts, too: `Grids.fold`.
    """

    pp: PerGrid = 1
    dp: PerGrid = 1
    e: PerGrid = 1
    z: PerGrid = 1
    cp: PerGrid = 1
    x: PerGrid = 1
    y: PerGrid = 1
    micro: PerGrid = 1
    virtual: PerGrid = 1
    fold: PerGrid = 0

    @property
    def ranks(self) -> PerGrid:
        return self.pp * self.replicas * self.z * self.x * self.y

    @property
    def replicas(self) -> PerGrid:
        """Ranks with the same weights, over which gradients are summed."""
        return self.dp * self.e * self.cp

    @property
    def shares(self) -> PerGrid:
        """Parts of a batch that different ranks work on at a time."""
        return self.dp * self.e * self.z

    @property
    def grids(self) -> Grids:
        """The ranks of one stage, as blocks see them: context parallel ranks split rows, as data parallel ones do."""
        return Grids(self.dp * self.cp, self.z, self.x, self.y, self.e, self.fold)

    def splits(self, name: str) -> dict[str, PerGrid]:
        """Return, for a set of axes, the size of each axis in it: `Grids.splits`, where dp stands for dp and cp."""
        if name in STEP_AXES:
            return {name: getattr(self, name)}
        if name == "copies":
            return {"dp": self.dp, "cp": self.cp}
        if name == "replicas":
            return {"dp": self.dp, "cp": self.cp, "e": self.e}
        if name == "expert copies":
            return {"dp": self.dp, "cp": self.cp, "z": self.z}
        return self.grids.splits(name)

    def network(self, order: Sequence[str], hardware: Hardware) -> Network:
        return Network.of(self, order, hardware)  # type: ignore[arg-type]  # which reads sizes and `splits` alone

    def take(self, index: object) -> Splits:
        return Splits(*(each if isinstance(each, int) else each[index] for each in astuple(self)))

    def one(self, index: int) -> Splits:
        """Return the split at an index, as plain numbers."""
        return Splits(*(int(np.asarray(each).flat[index if np.ndim(each) else 0]) for each in astuple(self)))

    def as_dict(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in (*STEP_AXES, "micro", "virtual")}

    def __str__(self) -> str:
        axes = [f"{name}={getattr(self, name)}" for name in STEP_AXES if getattr(self, name) > 1]
        return " ".join(axes) or "one rank"
