"""A model that is split when it is called first, since nothing else tells what its code does with its layers.

Until then every rank has the dense model.  The first call shows what shares an input and what is added to what: a run
on tensors without memory with that call's own inputs or, where the code asks for numbers, one that computes.  Then
the layers are put on the grid, in place, and the call goes on.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from ndtp.compute.traces import unrecorded
from ndtp.errors import LayoutError, warn
from ndtp.models.called import is_called
from ndtp.models.compared_calls import calls_of
from ndtp.models.held import Held
from ndtp.models.made_classes import made_class
from ndtp.models.not_replicated import NotReplicated
from ndtp.models.observation import observe_call
from ndtp.models.plain_gradients import sum_plain_gradients_of
from ndtp.models.refused_code import refuse_shared_memory, refuse_wrapped
from ndtp.models.report import Report
from ndtp.models.seen_by_ranks import seen_by_all
from ndtp.runtime.arrival import is_plain, stored_shape
from ndtp.runtime.default_group import OwnRows
from ndtp.runtime.eagerly import WHY_EAGER, eagerly
from ndtp.runtime.points import Point, compare_once

WAITS = "the first call decides: no inputs are known with which the model runs; example= decides at once"


class WaitsForCall(NotReplicated):
    """The class of such a model."""


@dataclass(eq=False)
class FirstCall:
    """The split of a model that waits for its first call.

    Attributes:
        split: the model on its way to the grid.
        linears: how many Linears it has.
        strict: nothing to replace is an error.
        hooks: of the model, one that keeps torch from looking for its hooks before its call, which may give it some;
            and of its parameters, whose gradients are those of a dense model.
        is_told: that it gets gradients before its first call.
    """

    split: Any
    report: Report
    linears: int
    strict: bool
    hooks: list[Any] = field(default_factory=list)
    is_told: bool = False

    def wait(self) -> None:
        model = self.split.model
        theirs: Any = type(model)

        @eagerly(WHY_EAGER)
        @wraps(theirs.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "ndtp_waiting" not in vars(self) or is_somebodys(self):  # it is split: somebody kept this function
                return theirs.forward(self, *args, **kwargs)
            self.ndtp_waiting.settle((args, kwargs))
            return type(self).forward(self, *args, **kwargs)  # somebody may have put this one into a function of theirs

        model.__class__ = made_class(
            theirs.__name__, (WaitsForCall, theirs), {"__module__": theirs.__module__, "forward": forward}
        )
        model.ndtp_waiting = self
        if "forward" in vars(model):
            model.forward = OwnForward(model, vars(model)["forward"])
        for part in model.modules():  # which other methods of the model call
            if part is not model and is_called(part) and "forward" not in vars(part):
                part.forward = PartForward(model, part)
        self.hooks = [model.register_forward_hook(_nothing)]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.hooks.append(parameter.register_hook(partial(self._see_gradient, name)))
        self.report.mesh, self.report.waits = self.split.mesh, WAITS
        self.report.count(model, self.linears, 0)
        model.ndtp_report = self.report

    def _see_gradient(self, name: str, _: Any) -> None:
        """A gradient before the first call, of code that calls a method or layers of the model and not the model.

        Raises:
            LayoutError: ranks have rows of their own, whose gradients nobody would sum.
        """
        model, mesh = self.split.model, self.split.mesh
        if not is_plain(model.get_parameter(name)):
            return  # of another model, too, which is split
        axes = mesh.grid.nontrivial(self.split.frame.outside.dims[0])
        fix = "parallelize(..., example=...), which splits it at once; or call the model itself first"
        said = (
            f"parallelize: {type(model).__name__} waits for its first call, and '{name}' gets a gradient before it: "
            "its layers ran without it, whole on every rank"
        )
        if axes:
            raise LayoutError(
                f"{said}, and ranks along {', '.join(axes)} have gradients of their own rows\n  fix: {fix}"
            )
        if not self.is_told:
            self.is_told = True
            warn(f"ndtp: {said}\n  fix: {fix}")

    def compare_part(self, part: nn.Module) -> None:
        """Compare, before a call of a part splits the model, that all ranks call it.

        Raises:
            MismatchError: the others are elsewhere.
        """
        model, calls = self.split.model, calls_of(self.split.model)
        if calls is not None and calls.is_on:
            name = next(name for name, each in model.named_modules() if each is part)
            what = f"call of '{name}' of {type(model).__name__}, which waits for its first call"
            compare_once(self.split.mesh, Point(what, None))

    def settle(self, call: tuple[Any, Any] | None) -> None:
        """Split the model by what a call of it shows.

        Args:
            call: its arguments, positional and named ones; None where another method of the model, or code outside of
                it, calls a part of it first: then sizes and names decide.

        Raises:
            MismatchError: ranks are called in ways that show other things.
            LayoutError: nothing can be split, or another tool has wrapped the model since.
        """
        split, model = self.split, self.split.model
        refuse_wrapped(model)
        refuse_shared_memory(model)
        dense = [parameter for parameter in model.parameters() if is_plain(parameter)]
        model.__class__ = vars(type(model))["ndtp_bases"][-1]
        if isinstance(entry := vars(model).get("forward"), OwnForward):
            model.forward = entry.own
        for part in model.modules():
            if isinstance(vars(part).get("forward"), PartForward):
                del part.forward
        for hook in self.hooks[1:]:
            hook.remove()
        try:
            with torch.inference_mode(False), unrecorded():
                mesh = split.mesh
                with OwnRows(mesh, split.frame.outside.dims[0], type(model).__name__).while_running():
                    seen = None if call is None else observe_call(model, *call)
                seen = seen_by_all(seen, model, mesh, split.frame.outside.dims[0], "first call")
                with torch.device("cpu"):
                    held = Held(model)
                    split.place_by(seen)
                    finish(split, self.report, held, self.linears, self.strict)
        except BaseException:
            if all(map(is_plain, dense)):  # it is dense still, and can be called again
                self.hooks[0].remove()
                self.wait()
            raise
        del model.ndtp_waiting
        self.hooks[0].remove()


class OwnForward:
    """The forward that somebody gave such a model itself, in the place of its class's; its first call splits the model.

    Args:
        own: that forward.
    """

    def __init__(self, model: Any, own: Any) -> None:
        self.model, self.own, self.__wrapped__ = model, own, own  # the last for who looks at its signature

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "own") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.own, name)

    @eagerly(WHY_EAGER)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "ndtp_waiting" in vars(self.model) and not is_somebodys(self.model):
            self.model.ndtp_waiting.settle((args, kwargs))
        return self.own(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model that is only watched has the forward itself."""
        own = copy.deepcopy(self.own, memo)
        is_watched = memo.get(id(self.model.ndtp_waiting), self) is None
        return own if is_watched else OwnForward(copy.deepcopy(self.model, memo), own)


class PartForward:
    """The forward of a part of such a model, until the model is split: a call of the part alone splits it."""

    def __init__(self, model: nn.Module, part: nn.Module) -> None:
        self.model, self.part, self.__wrapped__ = model, part, part.forward

    def __getattr__(self, name: str) -> object:
        if name in ("model", "part") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @eagerly(WHY_EAGER)
    def __call__(self, *args: object, **kwargs: object) -> object:
        waiting = vars(self.model).get("ndtp_waiting")
        if waiting is not None and not is_somebodys(self.model) and not is_in_a_graph(self.model):
            waiting.compare_part(self.part)
            waiting.settle(None)
        return type(self.part).forward(self.part, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """A copy of the part alone, or of a model that is only watched, waits for nothing."""
        part = copy.deepcopy(self.part, memo)
        waits = id(self.model) in memo and memo.get(id(vars(self.model).get("ndtp_waiting")), self) is not None
        return PartForward(copy.deepcopy(self.model, memo), part) if waits else MethodType(type(part).forward, part)


def is_in_a_graph(model: nn.Module) -> bool:
    """Return whether code has computed with a parameter, in a graph of autograd that is still there, which holds it."""
    return any(p._use_count() > 1 for p in model.parameters())  # type: ignore[attr-defined]


def is_somebodys(model: nn.Module) -> bool:
    """Return whether a model has the parameters of a tracer, or of a function that somebody called with it.

    Those on the grid are of another split model, with which it shares them.
    """
    return any(type(p) is not nn.Parameter and not _is_on_grid(p) for p in model.parameters())


def _is_on_grid(parameter: nn.Parameter) -> bool:
    return not is_plain(parameter) and isinstance(parameter, nn.Parameter)


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def can_wait(model: nn.Module) -> bool:
    """Return whether a model may stay dense until it is called: its weights are there, and it is called by itself.

    A model without a `forward` never is.
    """
    return is_called(model) and not any(p.is_meta for p in model.parameters()) and "ndtp_stage" not in vars(model)


def refuse_padding(model: nn.Module) -> None:
    """Refuse parameters that lie on the grid with padding.

    Raises:
        LayoutError: names the first of them.
    """
    for name, p in model.named_parameters():
        stored = stored_shape(p)
        if not is_plain(p) and stored.numel() != p.numel():
            raise LayoutError(
                f"parallelize: pad=False, and {name} {tuple(p.shape)} is padded to {tuple(stored)} as {p.ndtp_layout}\n"  # type: ignore[attr-defined]
                "  fix: pad=True; a grid whose axes divide the sizes; or keep=, for layers that stay whole"
            )


def finish(split: Any, report: Report, held: Held, linears: int, strict: bool) -> None:
    """End the split of a whole model: states of optimizers, gradients of plain parameters, and the report.

    Raises:
        LayoutError: nothing was replaced, or a parameter was padded, which nobody wants.
    """
    if not split.pad:
        refuse_padding(split.model)
    report.replaced, report.kept, report.split, report.waits = split.replaced, split.kept, split, ""
    report.carried, report.was_dense = held.bring(split.mesh), held.was_dense
    sum_plain_gradients_of(split.model, split.mesh, split.frame.outside.dims[0], watches=False)
    report.of(split.model, split.mesh, linears, split.linears, strict)
