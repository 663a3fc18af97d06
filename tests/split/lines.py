"""What a line of a random program may be: one of torch's functions, with arguments that fit the values there are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from texts import OVERLAPPING, TEXTS
from torch import Tensor


def fixed(*sizes: int) -> Tensor:
    """Numbers that are the same wherever they are made."""
    return torch.cos(torch.arange(1.0, 1 + math.prod(sizes), dtype=torch.float64) * 1.7).view(sizes)


class Draw:
    """Values and arguments at random.

    Attributes:
        layers: those that the line makes, by name.
        of: the value that the line is about; any value where this is empty.
        writes: whether the program writes in place; torch leaves undefined what that does to windows that overlap.
    """

    def __init__(self, rng: random.Random, values: dict[str, Any], known: dict[str, str], writes: bool) -> None:
        self.rng, self.values, self.known, self.writes = rng, values, known, writes
        self.layers: dict[str, str] = {}
        self.of = ""

    def value(self, test: Callable[[Tensor], bool] = lambda x: True) -> str:
        """A value; later ones are likelier."""
        fit = [name for name, x in self.values.items() if is_number(name, x) and test(x)]
        return self.rng.choice([*fit, *fit[-3:], *fit[-2:]])

    def beside(self, x: str) -> str:
        """Another value that broadcasts to the sizes of x, or fixed numbers that do."""
        shape = self.values[x].shape
        other = [name for name, y in self.values.items() if is_number(name, y) and goes_with(y.shape, shape)]
        if other and self.rng.random() < 0.8:
            return self.rng.choice(other)
        keep = shape[self.rng.randrange(len(shape) + 1) :]
        return f"fixed({', '.join(str(self.rng.choice([n, n, 1])) for n in keep)})"

    def factor(self, x: str) -> str:
        """What x can be multiplied with."""
        k, rng = self.values[x].shape[-1], self.rng
        fit = [f"fixed({k}, {rng.choice([2, 3, 4, 8])})", f"fixed({k})"]
        for name, y in self.values.items():
            if is_number(name, y) and y.dim() > 1 and k in y.shape[-2:]:
                fit.append(name if y.shape[-2] == k else f"{name}.mT")
        return rng.choice(fit)

    def layer(self, kind: str) -> str:
        """A layer, at times one that is there already."""
        alike = [name for name, made in self.known.items() if made == kind]
        if alike and self.rng.random() < 0.5:
            return f"self.{self.rng.choice(alike)}"
        name = f"l{len(self.known) + len(self.layers)}"
        self.layers[name] = kind
        return f"self.{name}"

    def index(self, size: int) -> str:
        """A key for one dim."""
        rng = self.rng
        return rng.choice([
            ":", ":", ":", str(rng.randrange(-size, size)), f"{rng.randrange(size)}:", f":{rng.randrange(1, size + 1)}",
            "::2", "None", f"{[rng.randrange(size) for _ in range(rng.randrange(1, 4))]}",
            f"torch.tensor({[rng.randrange(-size, size) for _ in range(rng.randrange(1, 4))]})",
            f"torch.arange({size}) % 2 == 0",
        ])  # fmt: skip

    def key(self, shape: Any) -> str:
        count = self.rng.randrange(1, len(shape) + 1)
        if self.rng.random() < 0.3:
            return ", ".join(["...", *map(self.index, shape[len(shape) - count :])])
        return ", ".join(map(self.index, shape[:count]))

    def words(self, x: str, dim: int) -> dict[str, Any]:
        """All that a text may name, for one value and one of its dims."""
        rng, shape = self.rng, list(self.values[x].shape)
        size, count = shape[dim], len(shape)
        cuts = sorted({0, size, *(rng.randrange(size) for _ in range(2))})
        a, b = rng.sample(range(count), 2) if count > 1 else (0, 0)
        sizes, small, ones = factors(rng, math.prod(shape)), list(shape), list(shape)
        small[dim], ones[dim] = 2, 1
        few = [rng.randrange(size) for _ in range(rng.randrange(1, 5))]
        expanded = [-1] * (count + 1)
        expanded[rng.randrange(count + 1)] = 3
        free = rng.randrange(len(sizes))
        return {
            "x": x, "y": self.beside(x), "z": self.factor(x), "dim": rng.choice([dim, dim - count]), "a": a, "b": b,
            "keep": rng.choice(["", ", keepdim=True"]), "n": shape[-1], "rows": shape[-2] if count > 1 else 1,
            "size": size, "at": rng.randrange(size), "k": rng.randrange(1, size + 1), "count": rng.choice([2, 3]),
            "parts": [d - c for c, d in itertools.pairwise(cuts)], "part": rng.randrange(len(cuts) - 1),
            "order": rng.sample(range(count), count), "key": self.key(shape), "few": few, "one": few[:1],
            "form": ", ".join(map(str, sizes)), "new": rng.randrange(-count - 1, count + 1),
            "free": ", ".join("-1" if i == free else str(n) for i, n in enumerate(sizes)),
            "split": tuple(factors(rng, size)), "expanded": ", ".join(map(str, expanded)),
            "times": ", ".join(str(rng.choice([1, 1, 2])) for _ in range(count + rng.choice([0, 0, 1]))),
            "index": f"(fixed({', '.join(map(str, small))}) > 0).long().clamp(max={size - 1})",
            "ones": ", ".join(map(str, ones)), "whole": ", ".join(map(str, shape)), "letters": "abcdef"[:count],
            "kept": "".join(c for c in "abcdef"[:count] if rng.random() < 0.6), "first": "abcdef"[: count - 1],
            "last": "abcdef"[count - 1 : count],
        }  # fmt: skip

    def line(self, kind: str) -> str:
        """A line of one kind.

        Raises:
            IndexError: no value fits.
        """
        rng = self.rng
        text = rng.choice([text for text in TEXTS[kind] if not (self.writes and text in OVERLAPPING)])
        x = self.of or self.value(lambda x: x.dim() > 0)
        dim = rng.randrange(self.values[x].dim())
        words = self.words(x, dim)
        return self.with_layers(text, words) if "<nn." in text else text.format(**words)

    def with_layers(self, text: str, words: dict[str, Any]) -> str:
        """`<nn.Linear(8, 12)>` in a text is a layer."""
        rng = self.rng
        words |= {"out": rng.choice([4, 6, 8, 8, 12, 1, 3]), "wide": rng.choice([8, 12]), "bias": rng.random() < 0.5}
        words |= {"channels": words["rows"]}
        pieces = text.format(**words).split("<nn.")
        made = [pieces[0]]
        for piece in pieces[1:]:
            layer, _, rest = piece.partition(">")
            made.append(self.layer(f"nn.{layer}") + rest)
        return "".join(made)


def is_number(name: str, x: Any) -> bool:
    return name[0] == "v" and isinstance(x, Tensor) and x.is_floating_point()


def goes_with(small: Any, large: Any) -> bool:
    try:
        return bool(torch.broadcast_shapes(small, large) == large)
    except RuntimeError:
        return False


def factors(rng: random.Random, count: int) -> list[int]:
    """Sizes of a few dims that hold so many elements."""
    parts = []
    while count > 1 and len(parts) < 4:
        n = rng.choice([d for d in range(2, count + 1) if count % d == 0])
        parts.append(n)
        count //= n
    parts = parts or [1]
    parts[-1] *= count
    if rng.random() < 0.2:
        parts.insert(rng.randrange(len(parts) + 1), 1)
    rng.shuffle(parts)
    return parts
