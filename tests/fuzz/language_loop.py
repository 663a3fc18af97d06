"""The training loop of a `Language` program, by itself and with one rank that does otherwise."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from language import INPUTS, Language
from language_models import call, made, name_in
from torch import Tensor, nn

from ndtp.cli.disagreements import KINDS
from ndtp.cli.odd_rank import Batch, Disagreement, TrainingLoop
from ndtp.errors import CheckpointError, MismatchError
from ndtp.runtime.process_grid import ProcessGrid

KIND_OF = {kind.name: kind for kind in KINDS}
# Points of a loop at which a kind changes parts of a model, or how it is made: such a model is made anew.  At all
# others one rank may do otherwise with a model that has gone through a program's deeds.
OF_A_MODEL = {"seed", "scheme", "split", "parameters", "call", "clip", "end"}


class Wrong(Exception):
    """What a program must not find."""


def batch_of(program: Language, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(program.vocabulary, (program.batch, program.length), generator=draw)
    mask = torch.where(torch.rand(ids.shape, generator=draw) < 0.2, -10.0, 0.0)
    mask[0, 1], mask[-1, -1] = -10.0, 0.0  # never all zeros, and with a last token to hide
    positions = torch.arange(program.length).roll(int(torch.randint(4, (), generator=draw))).expand_as(ids)
    given = [x if name in program.inputs else None for name, x in zip(INPUTS, (mask, positions), strict=True)]
    return Batch(ids, ids.roll(-1, 1), *given)


class Named:
    """Finds parts of a model by the names that they have in the model by torch alone."""

    def __init__(self, family: str, model: nn.Module) -> None:
        self.family, self.model = family, model

    def get_submodule(self, name: str) -> nn.Module:
        return self.model.get_submodule(name_in(self.family, name))

    def get_parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name_in(self.family, name))

    def told(self, name: str) -> str:
        """As errors name a part: tied parameters by the first of their names."""
        try:
            parameter = self.get_parameter(name)
        except AttributeError:
            return name_in(self.family, name)
        return next(name for name, each in self.model.named_parameters() if each is parameter)


class Loop(TrainingLoop):
    """Of a model that is made anew, with all that the kind needs: dropout, inputs, two layers to exchange."""

    def __init__(
        self, program: Language, kind: Disagreement = KINDS[0], mesh: ProcessGrid | None = None, is_odd: bool = False
    ) -> None:
        super().__init__(kind, mesh, program.scheme, is_odd, True if kind.thorough else None)  # type: ignore[arg-type]
        asked = {name for name in INPUTS if f"input {name}" in kind.changes}
        self.program = replace(
            program,
            inputs=tuple({*program.inputs, *asked}),
            dropout=kind.dropout,
            **{name: (2 * getattr(program, name))[:2] for name in ("mixes", "cores", "projections")},
        )

    def dense(self) -> nn.Module:
        return made(self.program)

    def named(self, model: nn.Module) -> Any:
        return Named(self.program.family, model)

    def call(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = {"mask": batch.mask, "positions": batch.positions, "asks": batch.asks}
        return call(self.program.family, model, batch.ids, batch.labels, **inputs)  # type: ignore[no-any-return]

    def logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        return call(self.program.family, model, ids)  # type: ignore[no-any-return]

    def batch(self, step: int) -> Batch:
        return batch_of(self.program, self.program.seed + 1000 * step + 500)

    def expected(self) -> str:
        """What an error says, with this model's names and numbers."""
        named = self.named(self.dense())
        text = re.sub(r"'([a-z][\w.]*)", lambda found: f"'{named.told(found[1])}", self.kind.says)
        text = re.sub(r"\binput (\w+):", lambda found: f"input {name_in(self.program.family, found[1])}:", text)
        return re.sub(r"\b(call|step) \d", lambda found: rf"{found[1]} \d+", text)


class LaterLoop(Loop):
    """Of a model, and the optimizer that was held of it, as a program's deeds have left them."""

    def __init__(self, side: Any, kind: Disagreement, is_odd: bool) -> None:
        super().__init__(side.program, kind, side.mesh, is_odd)
        self.side = side

    def model(self) -> nn.Module:
        return self.side.model  # type: ignore[no-any-return]

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.side.optimizer is None or "optimizer" in self.kind.changes:
            return super().optimizer(parameters)
        return self.side.optimizer  # type: ignore[no-any-return]


def is_of_a_model(kind: Disagreement) -> bool:
    return bool(kind.program or kind.thorough or kind.dropout or kind.at == 0 or OF_A_MODEL & {*kind.changes})


def name_the_odd(side: Any) -> None:
    """Steps of training, in one of which one rank does something else; no other message is sent.

    Raises:
        Wrong: not all ranks name it.
    """
    program, said = side.program, ""
    kind, is_odd = KIND_OF[program.odd], side.mesh.rank == program.rank
    loop = Loop(program, kind, side.mesh, is_odd) if is_of_a_model(kind) else LaterLoop(side, kind, is_odd)
    try:
        loop.train() if kind.program is None else kind.program(loop)
    except (MismatchError, CheckpointError) as error:
        said = str(error)
    told: list[Any] = [None] * program.ranks
    dist.all_gather_object(told, said)
    if not all(re.search(loop.expected(), text, re.DOTALL) for text in told):
        raise Wrong(f"{kind.name} on rank {program.rank} is not named on all: {told}")
