"""A training loop of a small model, at whose points a rank may differ; see `ndtp.cli.disagreements`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ndtp
from ndtp.runtime.process_grid import ProcessGrid

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 32, 16, 4, 8, 3

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Batch:
    """The inputs of a step; `asks` is a flag of the model."""

    ids: Tensor
    labels: Tensor
    mask: Tensor | None
    positions: Tensor | None
    asks: bool = False


@dataclass(frozen=True)
class Disagreement:
    """One thing that a rank does otherwise.

    Attributes:
        says: what the error says of it, a regular expression; "" for what is no disagreement.
        changes: by the point of the loop at which something else comes of what is there; see `TrainingLoop`.
        dropout: of the model.
        program: what all ranks run.
        at: the step in which it is done.
        thorough: whether ranks look at all there is in every call, `check=True`; as far as they compare at all.
        along_dp: the grid has an axis `dp` alone, along which ranks have sequences of their own.
    """

    name: str
    says: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    dropout: float = 0.0
    program: Callable[[TrainingLoop], None] | None = None
    at: int = 1
    along_dp: bool = False
    thorough: bool = False


class SmallAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        seen = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class SmallLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), SmallAttention()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.drop(self.down(self.act(self.up(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A small language model of torch's own layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.layers = nn.ModuleList(SmallLayer(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        asks: bool = False,
    ) -> Tensor:
        h = self.tokens(ids) + (0 if positions is None else self.places(positions))
        for layer in self.layers:
            h = layer(h, mask)
        logits = self.head(h)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass
class TrainingLoop:
    """A training loop with a kind of disagreement on one rank.

    Points at the start: "seed", "scheme", "split" (the model on the grid), "optimizer" (its class and settings),
    "parameters" of the optimizer.  Points of the step `kind.at`: "skips", "batch", "input ids" (and so on, each field
    of the batch), "train", "call" (the model, before its call), "around" (of the grid, a context of the call), "again"
    (whether the model is called once more), "loss", "backward", "gradients" (by what they are multiplied), "clip" (the
    parameters, whose gradients are there), "steps" (how often the optimizer steps), "zero" ("none", "zeros", "keep"),
    "end" (the model).  A loop of another model overrides `dense`, `named`, `call` and `logits`.

    Attributes:
        is_odd: whether this is the rank that does otherwise.
        rows: the axis along which ranks have sequences of their own, if any has.
    """

    kind: Disagreement
    mesh: ProcessGrid
    scheme: str
    is_odd: bool
    check: bool | None
    rows: str = ""

    def changed(self, point: str, value: Any) -> Any:
        change = self.kind.changes.get(point) if self.is_odd else None
        return value if change is None else change(value)

    def dense(self) -> nn.Module:
        return Decoder(self.kind.dropout)

    def named(self, model: nn.Module) -> nn.Module:
        """Return what finds layers and parameters of a model by the names that they have in `Decoder`."""
        return model

    def call(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss."""
        return model(batch.ids, batch.labels, batch.mask, batch.positions, asks=batch.asks)  # type: ignore[no-any-return]

    def logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids)  # type: ignore[no-any-return]

    def model(self) -> nn.Module:
        torch.manual_seed(self.changed("seed", 0))
        dense, scheme = self.dense(), self.changed("scheme", self.scheme)
        split = ndtp.parallelize(dense, self.mesh, scheme=scheme, check=self.check)
        torch.manual_seed(0)
        self.changed("split", self.named(split))
        return split

    def batch(self, step: int) -> Batch:
        own = self.mesh.grid.coordinate(self.mesh.rank)[self.rows] if self.rows else 0
        draw = torch.Generator().manual_seed(step + 100 * own)
        ids = torch.randint(VOCABULARY, (max(4, self.mesh.grid.num_ranks), LENGTH), generator=draw)
        mask = torch.zeros(ids.shape)
        mask[0, -1] = -10.0
        return Batch(ids, ids.roll(-1, 1), mask, torch.arange(LENGTH).expand_as(ids))

    def train(self) -> None:
        model = self.model()
        parameters = self.changed("parameters", list(model.parameters()))
        optimizer = self.optimizer(parameters)
        for step in range(STEPS):
            changed = self.changed if step == self.kind.at else unchanged
            if not changed("skips", False):
                self.step(model, optimizer, parameters, self.batch(step), changed)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind, options = self.changed("optimizer", (torch.optim.SGD, {"lr": 0.1}))
        return kind(parameters, **options)  # type: ignore[no-any-return]

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        batch: Batch,
        changed: Callable[[str, Any], Any],
    ) -> None:
        """One step of training.

        Args:
            changed: gives what comes of what is there at a point.
        """
        batch = changed("batch", batch)
        batch = replace(batch, **{x.name: changed(f"input {x.name}", getattr(batch, x.name)) for x in fields(batch)})
        model.train(changed("train", True))
        changed("call", self.named(model))
        around = changed("around", self.mesh)
        with nullcontext() if around is self.mesh else around:
            loss = self.call(model, batch)
        if changed("again", False):
            self.call(model, batch)
        if changed("backward", True):
            changed("loss", loss).backward()
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], changed("gradients", 0.5))
            changed("clip", parameters)
        for _ in range(changed("steps", 1)):
            optimizer.step()
        zero = changed("zero", "none")
        if zero != "keep":
            optimizer.zero_grad(set_to_none=zero == "none")
        with torch.no_grad():
            changed("end", self.named(model))


def unchanged(_: str, value: object) -> object:
    return value
