"""What belongs to a user's parameters and layers, brought along when these are put on a grid.

A layer stays the same object.  A parameter cannot (torch lets no plain tensor become a DTensor), so what hangs on it is
handed to the one in its place: attributes, hooks with their handles, its gradient, its place in an optimizer with its
state there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.errors import LayoutError
from ndtp.nn.parameters import empty_parameter, fill_from_dense
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.process_grid import ProcessGrid


class _Belongings(NamedTuple):
    attributes: Mapping[str, Any]
    on_gradient: Any
    on_accumulated: Any
    gradient: Tensor | None
    old: weakref.ref[Tensor]


class _Place(NamedTuple):
    """Where an optimizer has a parameter."""

    optimizer: Any
    group: int
    at: int
    name: str


class Belongings:
    """Of all parameters of a model, taken stock of before these are replaced.

    Raises:
        LayoutError: the state that an optimizer has of a parameter cannot be split with it.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters(remove_duplicate=False))
        names: dict[int, str] = {}
        self._of: dict[str, _Belongings] = {}
        for name, p in named:
            names.setdefault(id(p), name)
            self._of[name] = _Belongings(
                dict(vars(p)), p._backward_hooks, p._post_accumulate_grad_hooks, p.grad, weakref.ref(p)
            )
        self._places = [
            _Place(optimizer, g, i, names[id(p)])
            for optimizer in _optimizers()
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
            if id(p) in names
        ]
        for place in self._places:
            _check_state(place)

    def bring(self, model: nn.Module, mesh: ProcessGrid) -> list[str]:
        """Hand all of it to the parameters that have these names now; what was moved, for the report."""
        now = dict(model.named_parameters(remove_duplicate=False))
        done: set[int] = set()
        hooks = 0
        for name, theirs in self._of.items():
            new = now.get(name)
            if new is None or theirs.old() is new or id(new) in done:
                continue
            done.add(id(new))
            for key, value in theirs.attributes.items():
                if key not in vars(new):
                    setattr(new, key, value)
            if theirs.gradient is not None:
                new.grad = _like(new, theirs.gradient, mesh)
            # The same dicts, so that a handle of the user's still removes its hook.
            if theirs.on_gradient:
                new._backward_hooks = theirs.on_gradient
            if theirs.on_accumulated:
                new._post_accumulate_grad_hooks = theirs.on_accumulated
            hooks += len(theirs.on_gradient or ()) + len(theirs.on_accumulated or ())
        lines = [f"{hooks} hooks of parameters, which get DTensors now"] if hooks else []
        moved: dict[int, list[_Place]] = {}
        for place in self._places:
            if self._of[place.name].old() is not now.get(place.name):
                moved.setdefault(id(place.optimizer), []).append(place)
        for places in moved.values():
            for place in places:
                _put(place, now[place.name], mesh)
            lines.append(f"{len(places)} parameters of {type(places[0].optimizer).__name__}, which was built before")
        self._of.clear()
        self._places.clear()
        return lines


def _optimizers() -> list[Any]:
    """All that there are in this process: an optimizer knows its parameters, these do not know it.

    They are looked for among what refers to a class of optimizers, as an instance does to its own: a third of the time
    that a look at the class of every object takes.
    """
    kinds = _with_subclasses(torch.optim.Optimizer)
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _check_state(place: _Place) -> None:
    old = place.optimizer.param_groups[place.group]["params"][place.at]
    if not is_plain(old):
        return
    for key, value in place.optimizer.state.get(old, {}).items():
        if isinstance(value, Tensor) and value.dim() and value.shape != old.shape:
            raise LayoutError(
                f"parallelize: {type(place.optimizer).__name__} was built before and has stepped; its state {key!r} "
                f"of '{place.name}' {tuple(old.shape)} is {tuple(value.shape)}, which cannot be split as the parameter"
                "\n  fix: parallelize before the first step"
            )


def _put(place: _Place, new: nn.Parameter, mesh: ProcessGrid) -> None:
    params = place.optimizer.param_groups[place.group]["params"]
    old, params[place.at] = params[place.at], new
    state = place.optimizer.state.pop(old, None)
    if state is not None:
        place.optimizer.state[new] = {
            key: _like(new, value, mesh) if isinstance(value, Tensor) and value.shape == old.shape and value.dim()
            else value
            for key, value in state.items()
        }  # fmt: skip


def _like(new: nn.Parameter, dense: Tensor, mesh: ProcessGrid) -> Tensor:
    """A dense tensor, to lie as the parameter does."""
    if is_plain(new):
        return dense
    placements: Sequence[Any] = new.placements  # type: ignore[attr-defined]
    layout = Layout.from_placements(mesh.grid, mesh.mesh_axes, placements, new.dim())
    own = empty_parameter(tuple(new.shape), layout, mesh, dense.device, dense.dtype).detach()
    if dense.dim() < new.dim():  # gates and ups of experts, in one dim
        dense = dense.unflatten(1, (2, -1))
    if not dense.is_meta:
        fill_from_dense(own, layout, mesh, dense.detach())
    return own


def in_place_of(module: nn.Module, layer: nn.Module) -> Any:
    """`module`, which becomes what `layer` is: what else it has, its hooks of state dicts among it, it keeps."""
    fresh = vars(nn.Module())
    own = {key: value for key, value in vars(layer).items() if key not in fresh or "hooks" not in key}
    module.__class__ = type(layer)
    vars(module).update(own)
    return module
