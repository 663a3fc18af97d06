"""Programs at random, as text: modules whose forward calls torch's functions in random order on random values.

A program is a module that could stand in somebody's repository, so that one that fails can be pasted and run.  Each
line is tried on dense tensors when it is drawn; what raises, or gives numbers that mean nothing, is drawn again.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from lines import Draw, fixed
from texts import TEXTS, WRITES
from torch import Tensor, nn

LARGEST, MOST = 50.0, 600  # of numbers, and elements of one value
# Of dense programs, which are then drawn again.
ERRORS = (ArithmeticError, AssertionError, LookupError, NameError, RuntimeError, TypeError, ValueError)
Made = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Program:
    """A module and its inputs.

    Attributes:
        layers: attribute -> the expression that makes the layer.
        inputs: argument -> sizes; of integers where its name begins with `ids`.
        lines: of its forward.
        outputs: the values that it returns.
    """

    seed: int
    layers: dict[str, str]
    inputs: dict[str, tuple[int, ...]]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        made = [f"        self.{name} = {layer}" for name, layer in self.layers.items()]
        return "\n".join([
            f"class Program(nn.Module):  # seed {self.seed}; inputs {self.inputs}", "    def __init__(self):",
            "        super().__init__()", *made, f"    def forward(self, {', '.join(self.inputs)}):",
            *(f"        {line}" for line in self.lines), f"        return {', '.join(self.outputs)},", "",
        ])  # fmt: skip

    def module(self) -> nn.Module:
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "fixed": fixed}
        exec(compile(str(self), f"program {self.seed}", "exec"), space)
        made: nn.Module = space["Program"]()
        for name, layer in made.named_children():
            filled(layer, name, self.seed)
        return made

    def given(self) -> list[Tensor]:
        """The inputs, floating-point ones with gradients."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [
            torch.randint(8, sizes, generator=generator) if name.startswith("ids")
            else torch.randn(sizes, generator=generator, dtype=torch.float64).requires_grad_()
            for name, sizes in self.inputs.items()
        ]  # fmt: skip

    def without(self, at: int) -> Program:
        return replace(self, lines=(*self.lines[:at], *self.lines[at + 1 :]))


@dataclass
class _Sketch:
    """A program that grows by a line at a time, with the values that it has so far."""

    rng: random.Random
    seed: int
    inputs: dict[str, tuple[int, ...]]
    writes: bool
    layers: dict[str, str] = field(default_factory=dict)
    modules: Any = field(default_factory=nn.Module)
    lines: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, of: str = "") -> bool:
        """Whether a line of one kind fits what there is, or one value of it."""
        draw = Draw(self.rng, self.values, self.layers, self.writes)
        draw.of = of
        try:
            text = draw.line(kind)
        except IndexError:  # no value that it takes
            return False
        for name, layer in draw.layers.items():
            try:
                setattr(self.modules, name, filled(eval(layer, {"nn": nn}), name, self.seed))
            except (AssertionError, ValueError):  # heads that do not divide
                return False
        return self.put(text if kind in WRITES else f"v{len(self.lines)} = {text}", draw.layers)

    def add_chain(self) -> None:
        """Gates and heads: a product of one layer, operations on all of its features, and parts of those."""
        among = ["unary", "binary", "along", "reshape", "expand"]
        kinds = ["features", *self.rng.choices(among, k=self.rng.randrange(4))]
        of = ""
        for kind in (*kinds, "apart"):
            count = len(self.lines)
            if not any(self.add(kind, of) for _ in range(4)):
                continue
            if kind == "features":
                of = f"v{count}"
            elif of and isinstance(self.values[f"v{count}"], Tensor):
                x = self.values[f"v{count}"]
                of = f"v{count}" if x.is_floating_point() and x.dim() else of

    def put(self, line: str, layers: dict[str, str]) -> bool:
        """Whether all lines run with this one; values are those after all, since some are views of others."""
        given = Program(self.seed, {}, self.inputs, (), ()).given()
        space: dict[str, Any] = {"torch": torch, "F": F, "self": self.modules, "fixed": fixed}
        space |= dict(zip(self.inputs, (x.detach() for x in given), strict=True))
        lines = [*self.lines, line]
        try:
            with torch.no_grad():
                exec("\n".join(lines), space)
        except ERRORS:
            return False
        values = {key: x for key, x in space.items() if key in self.inputs or key[0] == "v"}
        if not all(_is_fit(x) for x in values.values() if isinstance(x, Tensor)):
            return False
        self.values, self.lines, self.layers = values, lines, {**self.layers, **layers}
        return True


def filled(module: nn.Module, name: str, seed: int) -> nn.Module:
    """With numbers that follow from a name and a seed."""
    module = module.double()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / max(p.shape[-1], 1) ** 0.5)
    return module


def _is_fit(x: Tensor) -> bool:
    if not 0 < x.numel() <= MOST or x.dim() > 6:
        return False
    if not x.dtype.is_floating_point:
        return not x.is_complex()
    return bool(x.isfinite().all()) and bool(x.abs().max() < LARGEST)


def draw(seed: int, length: int | None = None, writes: bool | None = None) -> Program:
    """The program of a seed, whose dense forward and backward run."""
    rng = random.Random(seed)
    length = rng.randrange(4, 14) if length is None else length
    writes = rng.random() < 0.4 if writes is None else writes
    sizes = [rng.choice([2, 3, 4, 4, 6, 8]) for _ in range(rng.randrange(2, 4))]
    inputs = {"a": tuple(sizes), "b": tuple(rng.choice([sizes, sizes[-2:], [2, 4, 6, 8]]))}
    if rng.random() < 0.3:
        inputs["ids"] = tuple(sizes[:2])
    sketch = _Sketch(rng, seed, inputs, writes)
    sketch.put("v0 = a * 1.5", {})
    sketch.put("v1 = b + 0", {})
    changes = list(WRITES)
    kinds = [kind for kind in TEXTS if kind not in WRITES]
    while len(sketch.lines) < length + 2:
        if rng.random() < 0.08:
            sketch.add_chain()
        sketch.add(rng.choice(changes if writes and rng.random() < 0.3 else kinds))
    results = [key for key, x in sketch.values.items() if key[0] == "v" and isinstance(x, Tensor)]
    others = [key for key in results[:-1] if rng.random() < 0.4]
    made = Program(seed, sketch.layers, inputs, tuple(sketch.lines), (*others, results[-1]))
    return made if runs(made) else draw(seed + 10_000_000, length, writes and seed < 50_000_000)


def runs(program: Program) -> bool:
    """Whether the dense program runs, gradients included."""
    try:
        outputs, grads = computed(program.module(), program.given(), program)
    except ERRORS:
        return False
    found = [x for x in (*outputs, *grads) if x.is_floating_point()]
    return all(bool(x.isfinite().all()) and (not x.numel() or float(x.abs().max()) < 1e5) for x in found)


def computed(model: nn.Module, inputs: list[Any], program: Program, whole: Any = None) -> Made:
    """What a program returns, and the gradients of its inputs and parameters, all whole."""
    whole = whole or (lambda x: x)
    outputs = [torch.as_tensor(x) for x in model(*inputs)]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
    terms = [(x * fixed(*x.shape)).sum() for x in outputs if x.requires_grad]
    if terms:
        sum(whole(term) for term in terms).backward()
    grads = [x.grad if x.grad is not None else torch.zeros(x.shape) for x in [*leaves, *model.parameters()]]
    return [whole(x.detach()) for x in outputs], grads


def smallest(program: Program, fails: Any) -> Program:
    """Without the lines, outputs and layers that have no part in a failure."""
    if len(program.outputs) > 1:
        for name in program.outputs:
            less = replace(program, outputs=(name,))
            if runs(less) and fails(less):
                program = less
                break
    at = len(program.lines) - 1
    while at >= 0:
        less = program.without(at)
        if runs(less) and fails(less):
            program = less
        at = min(at, len(program.lines)) - 1
    used = "\n".join(program.lines)
    return replace(program, layers={k: v for k, v in program.layers.items() if f"self.{k}(" in used})
