"""One model of the zoo, how it is made and called, and the record of all."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALL: dict[str, Entry] = {}


@dataclass(frozen=True)
class Entry:
    """A model and its inputs.

    Attributes:
        name: "PACKAGE: CLASS", or what it is.
        make: makes the model, whose weights are drawn from torch's generator.
        inputs: makes a call's arguments, positional ones in a tuple or named ones in a dict, for a batch.
        batches: the sizes of the batch of the first and of the second call.
        packages: those that it needs.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    batches: tuple[int, int] = (4, 6)
    packages: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in self.packages)


def entry(name: str, inputs: Callable[[int], Any], *packages: str, batches: tuple[int, int] = (4, 6)) -> Any:
    """Put a class, or a function that makes a model, into the record."""

    def put(make: Any) -> Any:
        assert name not in ALL, name
        ALL[name] = Entry(name, make, inputs, batches, packages)
        return make

    return put


def numbers(*sizes: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Return what makes one tensor of a batch with these sizes."""
    return lambda batch: (torch.randn(batch, *sizes),)


def ids(length: int, words: int = 64, targets: bool = False) -> Callable[[int], tuple[Tensor, ...]]:
    """Return what makes token ids, with targets behind them where a model takes them."""
    return lambda batch: tuple(torch.randint(words, (batch, length)) for _ in range(1 + targets))


def of(
    package: str, path: str, inputs: Callable[[int], Any], *args: Any, batches: tuple[int, int] = (4, 6), **kwargs: Any
) -> None:
    """Put `path` of a package, called with arguments, into the record; "module:name.of.it"."""
    module, _, names = path.partition(":")

    def make() -> nn.Module:
        made = importlib.import_module(module)
        for name in names.split("."):
            made = getattr(made, name)
        return made(*args, **kwargs)  # type: ignore[operator, no-any-return]

    name = f"{package}: {args[0] if names == 'create_model' else names}"
    ALL[name] = Entry(name, make, inputs, batches, (module.partition(".")[0],))
