"""Logits that metrics ask for after an optimizer's step: their values are those of before it.

A head that is one with its loss computes no logits before somebody asks for them.  Where they are still to be had when
an optimizer is about to change the head's weights, this rank's shards of these are copied first, and go when nobody can
ask any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.models.seen_weights import with_weights
from ndtp.runtime.arrival import local_of, wrapped
from ndtp.runtime.versions import version_of

_OPEN: WeakSet[Any] = WeakSet()


class KeptWeights:
    """The weights of one call of a head, as it saw them.

    Args:
        members: the layers that were called.
    """

    def __init__(self, members: Any) -> None:
        self.members = members
        self.copies: dict[int, Any] = {}
        _OPEN.add(self)
        _observe()

    def parameters(self) -> Iterator[tuple[Any, str, Any]]:
        for member in self.members:
            for key, p in member._parameters.items():
                if p is not None:
                    yield member, key, p

    def keep(self, changed: set[int]) -> None:
        if self.copies or not any(id(p) in changed for _, _, p in self.parameters()):
            return
        with torch.no_grad():
            for _, _, p in self.parameters():
                local = local_of(p).detach().clone()
                copy = local if local_of(p) is p else wrapped(local, p._spec, getattr(p, "ndtp_real", None))
                self.copies[id(p)] = (version_of(p), copy)

    def has(self, x: Tensor, version: Any) -> bool:
        """Whether there is a copy of a weight as it was at a version."""
        return id(x) in self.copies and self.copies[id(x)][0] == version

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """Put the kept weights in their places, without gradients: backward is over where weights have changed."""
        copies = [(member, key, self.copies[id(p)][1]) for member, key, p in self.parameters() if id(p) in self.copies]
        with with_weights(copies), torch.no_grad():
            yield

    def done(self) -> None:
        """Forget the copies: the logits are computed."""
        self.copies.clear()
        _OPEN.discard(self)


@cache
def _observe() -> None:
    register_optimizer_step_pre_hook(_before)  # type: ignore[no-untyped-call]


def _before(optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> None:
    if not _OPEN or torch.compiler.is_compiling():
        return
    changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for each in list(_OPEN):
        each.keep(changed)
