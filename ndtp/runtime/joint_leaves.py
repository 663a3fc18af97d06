"""`JointLeaves`: the parameters of which a weight consists that several layers multiply by as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.runtime.gradient_ends import end_of

Make = Callable[[Sequence[Tensor]], Tensor]


class JointLeaves:
    """The parameters whose shards, in another order, are the shard of a weight.

    A gradient of the weight that waits for its sum waits as those of the parameters: the next backward may have a
    weight that consists of others.

    Args:
        leaves: the parameters; None in the place of zeros.
        shapes: of this rank's shards of them.
        make: makes the weight of shards, each number of which it has once.
        has: whether the backward that goes on has a gradient of one of them, by its place.
    """

    def __init__(
        self, leaves: Sequence[Tensor | None], shapes: Sequence[torch.Size], make: Make, has: Callable[[int], bool]
    ) -> None:
        self._leaves, self._shapes, self._make, self._has = leaves, shapes, make, has

    def wanted(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the parameters that get gradients in the backward that goes on, and before them their places."""
        for i, leaf in enumerate(self._leaves):
            if leaf is not None and leaf.requires_grad and self._has(i):
                yield i, leaf

    def parts_of(self, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameters, and what is theirs of a gradient of the weight."""
        with torch.enable_grad():
            shards = [gradient.new_zeros(shape, requires_grad=True) for shape in self._shapes]
            parts = torch.autograd.grad(self._make(shards), shards, gradient)
        for i, leaf in self.wanted():
            if torch._C._will_engine_execute_node(end_of(leaf)):  # type: ignore[attr-defined]
                yield leaf, parts[i].to(leaf.dtype)

    def joined(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Return a gradient of the weight made of those of parameters, by their places; zero where there is none."""
        some = next(iter(parts.values()))
        with torch.no_grad():
            return self._make([parts.get(i, some.new_zeros(shape)) for i, shape in enumerate(self._shapes)])


def made_of(
    parameters: Sequence[Any], shards: Sequence[Tensor], make: Make, has: Callable[[int], bool] = lambda place: True
) -> Tensor:
    """Return the weight that is made of the shards of parameters, which it tells of where all of them are such.

    Args:
        parameters: None where a shard is of none, and zero.
    """
    weight = make(shards)
    if weight.requires_grad and all(each is None or each.is_leaf for each in parameters):
        shapes = [shard.shape for shard in shards]
        weight.ndtp_leaves = JointLeaves(parameters, shapes, make, has)  # type: ignore[attr-defined]
    return weight
