"""The ways in which one rank may differ in a training loop: each kind changes one point of the loop.

Every kind must end as a `MismatchError` that names it on all ranks; what ranks may well have of their own must not.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ndtp
from ndtp.errors import CheckpointError, MismatchError
from ndtp.runtime.process_grid import ProcessGrid

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 32, 16, 4, 8, 3
NOTHING = "nothing was raised"

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Batch:
    """The inputs of a step; `asks` is a flag of the model, and `sampled` tokens are the model's own."""

    ids: Tensor
    labels: Tensor
    mask: Tensor | None
    positions: Tensor
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
        along_dp: the grid has an axis `dp` alone, along which ranks have sequences of their own.
    """

    name: str
    says: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    dropout: float = 0.0
    program: Callable[[TrainingLoop], None] | None = None
    at: int = 1
    along_dp: bool = False


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


def _call(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.ids, batch.labels, batch.mask, batch.positions, asks=batch.asks)  # type: ignore[no-any-return]


@dataclass
class TrainingLoop:
    """A training loop with a kind of disagreement on one rank.

    Points at the start: "seed", "scheme", "split" (the model on the grid), "optimizer" (its class and settings),
    "parameters" of the optimizer.  Points of the step `kind.at`: "skips", "batch", "train", "around" (of the grid, a
    context of the call), "again" (whether the model is called once more), "loss", "backward", "gradients" (of the
    parameters), "steps" (how often the optimizer steps), "zero" ("none", "zeros", "keep"), "end" (the model).

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

    def model(self) -> nn.Module:
        torch.manual_seed(self.changed("seed", 0))
        dense = Decoder(self.kind.dropout)
        split = ndtp.parallelize(dense, self.mesh, scheme=self.changed("scheme", self.scheme), check=self.check)
        torch.manual_seed(0)
        self.changed("split", split)
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
        kind, options = self.changed("optimizer", (torch.optim.SGD, {"lr": 0.1}))
        optimizer = kind(parameters, **options)
        for step in range(STEPS):
            changed = self.changed if step == self.kind.at else _unchanged
            if not changed("skips", False):
                self.step(model, optimizer, parameters, self.batch(step), changed)

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        batch: Batch,
        changed: Callable[[str, Any], Any],
        call: Callable[[nn.Module, Batch], Tensor] = _call,
    ) -> None:
        """One step of training.

        Args:
            changed: gives what comes of what is there at a point.
            call: of a model with a batch.
        """
        batch = changed("batch", batch)
        model.train(changed("train", True))
        changed("call", model)
        around = changed("around", self.mesh)
        with nullcontext() if around is self.mesh else around:
            loss = call(model, batch)
        if changed("again", False):
            call(model, batch)
        if changed("backward", True):
            changed("loss", loss).backward()
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], changed("gradients", 0.5))
        for _ in range(changed("steps", 1)):
            optimizer.step()
        zero = changed("zero", "none")
        if zero != "keep":
            optimizer.zero_grad(set_to_none=zero == "none")
        with torch.no_grad():
            changed("end", model)


def _unchanged(_: str, value: Any) -> Any:
    return value


def run_kind(
    counter: Any,
    sizes: Mapping[str, int],
    scheme: str,
    name: str,
    odd: int,
    check: bool | None,
    timeout: float,
) -> str:
    """Return the error that this rank raises where the rank `odd` does otherwise; runs on every rank."""
    kind = next(kind for kind in (*KINDS, *SILENT) if kind.name == name)
    mesh = ProcessGrid(ndtp.Grid(sizes), timeout=timeout)
    loop = TrainingLoop(kind, mesh, scheme, mesh.rank == odd, check, "dp" if kind.along_dp else "")
    try:
        loop.train() if kind.program is None else kind.program(loop)
    except (MismatchError, CheckpointError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        mesh.discard_gradients()
        torch.manual_seed(0)
        counter.advance()
    return NOTHING


# ---------------------------------------------------------------------------------------------------------- programs


def _sample(loop: TrainingLoop) -> None:
    """Tokens drawn from what the model says, by a generator that one rank has seeded otherwise."""
    model, ids = loop.model().eval(), loop.batch(0).ids[:, :4]
    draw = torch.Generator().manual_seed(loop.changed("sampling", 0))
    with torch.no_grad():
        for _ in range(4):
            logits: Any = model(ids)
            logits = logits.gathered() if hasattr(logits, "gathered") else logits
            ids = torch.cat((ids, torch.multinomial(logits[:, -1].softmax(-1), 1, generator=draw)), 1)


def _load(loop: TrainingLoop) -> None:
    """A checkpoint for each of two steps, of which one rank loads the other one."""
    model, folders = loop.model(), [tempfile.mkdtemp(prefix="ndtp-chaos-")]
    dist.broadcast_object_list(mine := list(folders))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(2):
            loop.step(model, optimizer, list(model.parameters()), loop.batch(step), _unchanged)
            ndtp.checkpoint.save(model, optimizer, f"{mine[0]}/{step}")
        ndtp.checkpoint.load(model, optimizer, f"{mine[0]}/{loop.changed('folder', 0)}")
    finally:
        dist.barrier()
        shutil.rmtree(folders[0])


def _in_threads(loop: TrainingLoop) -> None:
    """Another thread calls a second model while this one is in a call; what it raises is raised here."""
    models, batch, raised = [loop.model(), loop.model()], loop.batch(0), []

    def second() -> None:
        try:
            models[1](batch.ids, batch.labels)
        except MismatchError as error:
            raised.append(error)

    def inside(*_: Any) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    models[0].get_submodule("layers.0.act").register_forward_hook(inside)
    models[0](batch.ids, batch.labels)
    if raised:
        raise raised[0]


# ------------------------------------------------------------------------------------------------------------- kinds


def _to(value: Any) -> Change:
    return lambda _: value


def _of_batch(name: str, change: Change) -> Mapping[str, Change]:
    return {"batch": lambda batch: replace(batch, **{name: change(getattr(batch, name))})}


def _shorter(batch: Batch) -> Batch:
    given = (batch.ids, batch.labels, batch.mask, batch.positions)
    return Batch(*(None if x is None else x[:, : LENGTH // 2] for x in given))  # type: ignore[arg-type]


def _masked(mask: Tensor) -> Tensor:
    mask[-1, -1] = -10.0
    return mask


def _of_optimizer(**more: Any) -> Mapping[str, Change]:
    return {"optimizer": lambda found: (found[0], {**found[1], **more})}


def _freeze(model: nn.Module) -> None:
    model.get_parameter("head.weight").requires_grad_(False)


def _exchange(model: Any) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def _scaled(name: str, raw: bool) -> Change:
    def change(model: nn.Module) -> None:
        x: Any = model.get_parameter(name)
        (x.to_local().data if raw and hasattr(x, "to_local") else x).mul_(1.5)

    return change


def _hook(model: nn.Module) -> None:
    model.get_submodule("layers.0.act").register_forward_hook(lambda *_: None)


POINTS = "at different points: .*is at the"
KINDS = [
    Disagreement("input ids", "input ids: values", _of_batch("ids", lambda x: (x + 1) % VOCABULARY)),
    Disagreement("labels", "input labels: values", _of_batch("labels", lambda x: (x + 1) % VOCABULARY)),
    Disagreement("attention mask", "input mask: .* norm", _of_batch("mask", _masked)),
    Disagreement("position ids", "input positions: values", _of_batch("positions", lambda x: x + 1)),
    Disagreement("shape of inputs", r"input ids: .*\(\d+, 4\) int64", {"batch": _shorter}),
    Disagreement("dtype of an input", "input positions: .*int32", _of_batch("positions", lambda x: x.int())),
    Disagreement("no attention mask", "input mask: ", _of_batch("mask", _to(None))),
    Disagreement("a flag", "input asks: .*True", _of_batch("asks", _to(True))),
    Disagreement("eval", "training: .*False", {"train": _to(False)}),
    Disagreement("a part in eval", "training of 'layers.0.drop'", {"call": lambda model: model.layers[0].drop.eval()}),
    Disagreement("no_grad", "grad mode: .*False", {"around": lambda _: torch.no_grad()}),
    Disagreement("inference_mode", "(grad|inference) mode: ", {"around": lambda _: torch.inference_mode()}),
    Disagreement("autocast", "autocast: .*bfloat16", {"around": lambda _: torch.autocast("cpu", torch.bfloat16)}),
    Disagreement("accumulate", "accumulating gradients: .*True", {"around": lambda mesh: mesh.accumulate()}),
    Disagreement("a frozen layer", "requires_grad of 'head.weight': .*False", {"split": _freeze}),
    Disagreement("a layer frozen later", "requires_grad of 'head.weight': .*False", {"call": _freeze}),
    Disagreement("a hook", "hooks of 'layers.0.act': ", {"split": _hook}),
    Disagreement("order of layers", "module of 'layers", {"split": _exchange}),
    Disagreement("learning rate", "optimizer of step 1: lr: .*0.2", _of_optimizer(lr=0.2)),
    Disagreement("momentum", "optimizer of step 1: momentum: .*0.9", _of_optimizer(momentum=0.9)),
    Disagreement("optimizer", "optimizer of step 1: .*Adam", {"optimizer": lambda found: (torch.optim.Adam, found[1])}),
    Disagreement("weights of the optimizer", "optimizer of step 1: weights", {"parameters": lambda found: found[1:]}),
    Disagreement("loss scale", "factor of the loss", {"loss": lambda loss: loss * 8}),
    Disagreement("clip", "factor of gradients", {"gradients": _to(0.1)}),
    Disagreement("a skipped zero_grad", "gradient of '.*' when it was called", {"zero": _to("keep")}),
    Disagreement("zero_grad to zeros", "gradient of '.*' when it was called", {"zero": _to("zeros")}),
    Disagreement("a skipped step", f"{POINTS}|input ids: values", {"skips": _to(True)}),
    Disagreement("a skipped backward", f"{POINTS} .*call 3", {"backward": _to(False)}),
    Disagreement("a skipped optimizer step", "optimizer steps so far", {"steps": _to(0)}),
    Disagreement("an optimizer step done twice", "optimizer steps so far", {"steps": _to(2)}),
    Disagreement("a call of its own", f"{POINTS} .*call 3", {"again": _to(True)}),
    Disagreement("a weight changed through .data", "weight 'head.weight'", {"end": _scaled("head.weight", True)}, at=0),
    Disagreement("a weight written to", "weight 'layers.0.up.weight'", {"end": _scaled("layers.0.up.weight", False)}),
    Disagreement("dropout's seed", "random numbers of torch", {"call": lambda _: torch.manual_seed(1)}, 0.5),
    Disagreement("numbers drawn", "random numbers of torch", {"call": lambda _: torch.rand(1)}, 0.5),
    Disagreement("initial seed", "of 'tokens.weight'", {"seed": _to(1)}),
    Disagreement("scheme", "scheme|split|layout", {"scheme": lambda scheme: "1d" if scheme != "1d" else "1d-sp"}),
    Disagreement("sampling", "input ids: values", {"sampling": _to(1)}, program=_sample),
    Disagreement("a folder that is loaded", "ranks find different checkpoints", {"folder": _to(1)}, program=_load),
    Disagreement("two threads", "two threads .* call 1 of Decoder", program=_in_threads),
]  # fmt: skip
# What is no disagreement: ranks of another `dp` have sequences of their own; numbers that no dropout uses are free.
SILENT = [
    Disagreement("nothing", ""),
    Disagreement("other rows along dp", "", along_dp=True),
    Disagreement("numbers drawn, no dropout", "", {"call": lambda _: torch.rand(1)}),
]
