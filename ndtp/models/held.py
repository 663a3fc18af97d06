"""References that users hold to a model's parameters: a parameter stays the same object when it is put on a grid.

So lists, optimizers, averages and schedulers that were made before hold the split one, with its hooks and attributes.
Beside it, an optimizer that has stepped holds statistics of a parameter's shape, which are split with it here.
"""

from __future__ import annotations

import gc
import sys
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ndtp.errors import LayoutError
from ndtp.nn.parameters import shard_like
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.process_grid import ProcessGrid


class _State(NamedTuple):
    optimizer: Any
    parameter: nn.Parameter
    shape: tuple[int, ...]


class Held:
    """Taken stock of before a model is split, and brought to lie as its parameters do behind that.

    Raises:
        LayoutError: the state that an optimizer has of a parameter cannot be split with it, or hooks of a node of
            autograd would be lost; before anything is changed.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(p): name for name, p in model.named_parameters() if is_plain(p)}
        self.was_dense = all(map(is_plain, model.parameters()))
        self._hooked: list[nn.Parameter] = []
        for p in model.parameters():
            if id(p) not in names:
                continue
            if p._backward_hooks or p._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                self._hooked.append(p)
        _refuse_held_nodes({names[id(p)]: p for p in model.parameters() if id(p) in names})
        stepped = [] if all(p.is_meta for p in model.parameters()) else _stepped()
        self._states = [
            _State(optimizer, p, tuple(p.shape)) for optimizer in stepped for p in optimizer.state if id(p) in names
        ]
        for state in self._states:
            _check(state, names[id(state.parameter)])

    def bring(self, mesh: ProcessGrid) -> list[str]:
        """Split the states; what came along, for the report."""
        hooks = sum(
            len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ())  # type: ignore[attr-defined]
            for p in self._hooked
            if not is_plain(p)
        )
        lines = [f"{hooks} hooks of parameters, which get DTensors now"] if hooks else []
        counts: dict[int, tuple[str, int]] = {}
        for optimizer, parameter, shape in self._states:
            if is_plain(parameter):
                continue
            state = optimizer.state[parameter]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == shape:
                    state[key] = shard_like(parameter, value, mesh)
            kind, count = counts.get(id(optimizer), (type(optimizer).__name__, 0))
            counts[id(optimizer)] = (kind, count + 1)
        self._hooked.clear()
        self._states.clear()
        return lines + [f"the state that {kind} has of {count} parameters" for kind, count in counts.values()]


def _stepped() -> list[Any]:
    """The optimizers of this process that have a state: they know their parameters, these do not know them.

    They are looked for among what refers to a class of optimizers, as an instance does to its own: a third of the time
    that a look at the class of every object takes.
    """
    kinds = _with_subclasses(Optimizer)
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds and getattr(each, "state", None)]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _check(state: _State, name: str) -> None:
    for key, value in state.optimizer.state[state.parameter].items():
        if isinstance(value, Tensor) and value.dim() and value.shape != state.shape:
            raise LayoutError(
                f"parallelize: {type(state.optimizer).__name__} was built before and has stepped; its state {key!r} of "
                f"'{name}' {state.shape} is {tuple(value.shape)}, which cannot be split as the parameter\n"
                "  fix: parallelize before the first step; of a model that waits for its first call with example=, so "
                "that it lies on the grid before an optimizer steps or is loaded"
            )


def _refuse_held_nodes(parameters: dict[str, nn.Parameter]) -> None:
    """Hooks of the node that accumulates a gradient go with the dense parameter: somebody has them who holds the node.

    A graph that is still there keeps nodes alive, too, and runs no more: what tells them apart is who refers to them.
    """
    alive = {}
    for name, p in parameters.items():
        if p.requires_grad and p.is_leaf:
            node = torch.autograd.graph.get_gradient_edge(p).node
            if sys.getrefcount(node) > 2:
                alive[name] = node
            del node
    for holder in gc.get_referrers(*alive.values()) if alive else ():
        if holder is alive or isinstance(holder, types.FrameType):
            continue
        theirs = set(map(id, gc.get_referents(holder)))
        name = next(name for name, node in alive.items() if id(node) in theirs)
        raise LayoutError(
            f"parallelize: somebody holds the node of autograd that accumulates the gradient of '{name}', and hooks of "
            "it would not be called any more\n  fix: p.register_post_accumulate_grad_hook(...), which stays; or "
            "parallelize first"
        )
