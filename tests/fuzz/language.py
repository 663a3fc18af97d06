"""A program of the fuzz with a language model: odd attention, what is held before, what is done after, and an odd rank.

The model, by torch alone or of transformers, is split as a whole.  What a user holds from before must stay what it was;
operations on the split model give what they give on the dense one, or are refused by name; and where one rank is given
something else, all name it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from ndtp.cli.disagreements import KINDS

FAMILIES = ("own", "own", "llama")
SCHEMES = {"1d": ("x",), "1d-sp": ("x",), "2d": ("x", "y"), "2d-features": ("x", "y"), "3d": ("x", "y", "z")}
# What attention does to [batch, heads, tokens, features] behind its softmax, beside what it should.
MIXES = (
    "", "", "", "head norm", "gate", "pairs", "norm over heads", "softmax over heads", "numbers", "sequences",
    "talking", "halves", "flip", "cumsum", "tokens", "sorted", "mean", "strongest",
)  # fmt: skip
CORES = ("sdpa", "sdpa", "softmax", "linear", "cosine", "slopes", "talking scores")
PROJECTIONS = ("apart", "fused", "by head", "products")
# By what a user knows parts of the model from before it is split.
HELD = ("parameters", "optimizer", "optimizer that has stepped", "hook", "later hook", "state", "modules", "buffers")
# What is done with the split model, between steps of training.
DEEDS = (
    "train", "train", "train", "eval", "generate", "clip", "log", "ema", "dense ema", "copy", "fill", "init", "apply",
    "load", "load what was held", "assign", "tie", "freeze", "deepcopy", "pickle", "penalty", "to dense",
    "swap", "exchange",
)  # fmt: skip
INPUTS = ("mask", "positions")  # beside ids
ODD = tuple(kind.name for kind in KINDS)


@dataclass(frozen=True)
class Language:
    """Attributes:
    kv_heads: of key and value heads, which divide the heads.
    mixes, cores, projections: of each layer's attention.
    held: of `HELD`.
    deeds: of `DEEDS`, in order.
    inputs: of `INPUTS`, that the model is given in training and evaluation.
    dropout: behind each MLP, where an odd rank needs it; its mask is another one than dense draws.
    odd: what one rank does otherwise in the last steps, of `ODD`; and the rank.
    """

    seed: int
    ranks: int
    family: str = "own"
    scheme: str = "1d"
    grid: tuple[tuple[str, int], ...] = ()
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 4
    hidden: int = 16
    inner: int = 24
    vocabulary: int = 32
    batch: int = 2
    length: int = 6
    mixes: tuple[str, ...] = ("",)
    cores: tuple[str, ...] = ("sdpa",)
    projections: tuple[str, ...] = ("apart",)
    gated: bool = False
    norm: str = "layer"
    biases: bool = False
    tied: bool = False
    causal: bool = True
    adamw: bool = False
    held: tuple[str, ...] = ()
    deeds: tuple[str, ...] = ("train",)
    inputs: tuple[str, ...] = ()
    dropout: float = 0.0
    odd: str = ""
    rank: int = 0
    is_thorough: bool = False

    def features(self) -> set[str]:
        found = {f"language {self.family}", f"scheme {self.scheme}"}
        found |= {f"attention that mixes {mix}" for mix in self.mixes if mix}
        found |= {f"attention core {core}" for core in self.cores}
        found |= {f"input {name}" for name in self.inputs}
        found |= {f"held {held}" for held in self.held} | {f"after {deed}" for deed in self.deeds}
        return found | ({f"odd rank: {self.odd}"} if self.odd else set())

    def simpler(self) -> Iterator[Language]:
        """Each with one thing less."""
        for name in ("deeds", "held"):
            for i in range(len(getattr(self, name))):
                value = getattr(self, name)
                yield replace(self, **{name: value[:i] + value[i + 1 :]})
        if len(self.mixes) > 1:
            for part in (slice(0, 1), slice(1, None)):
                yield replace(self, mixes=self.mixes[part], cores=self.cores[part], projections=self.projections[part])
        for name, plain in (("mixes", ""), ("cores", "sdpa"), ("projections", "apart")):
            for i, value in enumerate(getattr(self, name)):
                if value != plain:
                    values = getattr(self, name)
                    yield replace(self, **{name: (*values[:i], plain, *values[i + 1 :])})
        for spec in fields(self):
            known = spec.name in (
                "seed",
                "ranks",
                "grid",
                "scheme",
                "odd",
                *("deeds", "held", "mixes", "cores", "projections"),
            )
            if not known and getattr(self, spec.name) != spec.default:
                yield replace(self, **{spec.name: spec.default})


def draw_language(seed: int, ranks: int) -> Language:
    rng = random.Random(f"language {seed} on {ranks}")
    scheme, layers = rng.choice(list(SCHEMES)), rng.choice([1, 1, 2])
    heads = rng.choice([2, 4, 4, 4, 6])
    program = Language(
        seed,
        ranks,
        rng.choice(FAMILIES),
        scheme,
        _draw_grid(rng, SCHEMES[scheme], ranks),
        heads,
        rng.choice([each for each in range(1, heads + 1) if heads % each == 0] + [heads]),
        rng.choice([4, 4, 8]),
        rng.choice([8, 16, 16, 24]),
        rng.choice([16, 24, 20]),
        rng.choice([32, 32, 37]),
        rng.choice([1, 2, 2, 4]),
        rng.choice([4, 6, 8, 7]),
        *(tuple(rng.choice(among) for _ in range(layers)) for among in (MIXES, CORES, PROJECTIONS)),
        gated=rng.random() < 0.4,
        norm=rng.choice(["layer", "layer", "rms", "none"]),
        biases=rng.random() < 0.5,
        tied=rng.random() < 0.3,
        causal=rng.random() < 0.7,
        adamw=rng.random() < 0.5,
        held=tuple(sorted(rng.sample(HELD, rng.randint(0, 3)))),
        deeds=tuple(rng.choice(DEEDS) for _ in range(rng.randint(1, 4))),
        is_thorough=rng.random() < 0.2,
    )
    if program.family == "llama":
        program = replace(program, hidden=4 * heads)
    if rng.random() < 0.35:
        program = replace(program, odd=rng.choice(ODD), rank=rng.randrange(ranks))
    return replace(program, inputs=tuple(name for name in INPUTS if rng.random() < 0.3))


def _draw_grid(rng: random.Random, axes: tuple[str, ...], ranks: int) -> tuple[tuple[str, int], ...]:
    sizes = dict.fromkeys(axes, 1)
    left = ranks
    while left > 1:
        factor = rng.choice([f for f in range(2, left + 1) if left % f == 0])
        sizes[rng.choice(axes)] *= factor
        left //= factor
    return tuple((axis, size) for axis, size in sizes.items() if size > 1) or ((axes[0], 1),)
