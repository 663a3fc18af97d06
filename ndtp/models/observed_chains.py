"""Layers that follow one another with functions of each element in between, and those of which a loss is taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ndtp.compute.torch_calls import Arguments, TorchFunction
from ndtp.models.between import DROPOUTS, KNOWN
from ndtp.models.hidden import PARTS
from ndtp.models.roles import features

FORMS = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, Tensor.contiguous,
    Tensor.__getitem__, Tensor.squeeze, Tensor.unsqueeze,
}  # fmt: skip
EACH = KNOWN | DROPOUTS
# They make features the second dim, as losses of several dims take them.
TURNS = {
    Tensor.transpose,
    torch.transpose,
    Tensor.permute,
    torch.permute,
    Tensor.movedim,
    torch.movedim,
    Tensor.swapaxes,
}


class Chains:
    """The layers of which tensors of one run were made.

    Attributes:
        chains: layers of one input and the layer that follows them.
        heads: layers whose results a loss was taken of, or which the model gives.
    """

    def __init__(self) -> None:
        self.chains: list[tuple[tuple[str, ...], str]] = []
        self.heads: set[str] = set()
        self.made_of: dict[int, tuple[str, ...]] = {}  # element by element
        self.rows_of: dict[int, str] = {}  # in another form

    def passed(self, name: str, x: Tensor, out: Tensor) -> None:
        """Note that a layer was called."""
        ups = self.made_of.get(id(x))
        if ups and (ups, name) not in self.chains:
            self.chains.append((ups, name))
        self.made_of[id(out)], self.rows_of[id(out)] = (name,), name

    def follow(self, func: TorchFunction, args: Arguments, given: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Note what a function makes of tensors."""
        first = given[0]
        if func is F.cross_entropy:
            self.heads |= {self.rows_of[id(x)] for x in args[:1] if id(x) in self.rows_of}
        if func in EACH and all(id(x) in self.made_of and x.shape == outs[0].shape for x in given):
            self.made_of[id(outs[0])] = tuple(dict.fromkeys(name for x in given for name in self.made_of[id(x)]))
        elif func in PARTS and len(self.made_of.get(id(first), ())) == 1 and len(outs) == 2:
            self.made_of |= dict.fromkeys(map(id, outs), self.made_of[id(first)])
        name = self.rows_of.get(id(first))
        if name is None or len(given) > 1:
            return
        is_form = func in EACH | FORMS and outs[0].shape[-1:] == first.shape[-1:]
        is_turn = func in TURNS and first.dim() > 2 and outs[0].shape == first.movedim(-1, 1).shape
        if is_form or is_turn:
            self.rows_of[id(outs[0])] = name

    def end(self, results: object, model: nn.Module) -> None:
        """Note what the model gives: a layer of more features than it takes may be a head, whose loss comes later."""
        for name in {self.rows_of.get(id(x)) for x in tree_leaves(results)} - {None}:
            inside, outside = features(model.get_submodule(name))  # type: ignore[arg-type]
            if outside > inside:
                self.heads.add(name)  # type: ignore[arg-type]


class Kinds:
    """Activations that must lie alike, as sets that grow together."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def new(self) -> int:
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, kind: int) -> int:
        while self.parent[kind] != kind:
            self.parent[kind] = self.parent[self.parent[kind]]
            kind = self.parent[kind]
        return kind

    def join(self, kinds: Sequence[int]) -> int:
        roots = [self.find(kind) for kind in kinds]
        for root in roots[1:]:
            self.parent[root] = roots[0]
        return roots[0]
