"""`autograd.Function`s of other people: their code would see shards and take them for the whole, so it gets the whole.

`Function.apply` asks no `__torch_function__`.  It is wrapped once, when the first model is split.  A checkpoint of
torch's hands what it gets to the model's code and does nothing else with it, so it gets shards and gives shards.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from ndtp.collectives.torch_patches import replaced
from ndtp.compute.torch_calls import Arguments, AutogradContext, Keywords
from ndtp.compute.traces import TransformedError
from ndtp.runtime.at_work import at_work
from ndtp.runtime.default_group import OwnRows, uses
from ndtp.split.elementwise import elementwise
from ndtp.split.outside_of_dispatch import whole_in_scripts_and_transforms
from ndtp.split.own_collectives import guard_collectives
from ndtp.split.tensor import TABLE, mapped, split_in
from ndtp.split.whole import on_whole, whole

_GIVEN: Any = vars(Function)["apply"]  # a method of the class, in Python or, from torch 2.15 on, in C
_SAVES_INPUTS = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)  # how torch 2.11 does what save_inputs does
_level: Any = torch._C._functorch.maybe_current_level  # type: ignore[attr-defined]  # of transforms of torch.func
_OURS = ("ndtp.", "torch.")
# How tensors of another kind go into functions: (on whole tensors, on shards or None, args, kwargs) -> the result, or
# `NotImplemented` where no argument is of the kind.
OTHER_KINDS: list[Callable[[Any, Any, Any, Any], Any]] = []
_METHODS = (types.MethodType, types.BuiltinMethodType)


def _given(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own `apply` of a class."""
    return _GIVEN.__get__(None, cls)(*args, **kwargs)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if cls.__module__.startswith("ndtp."):  # gets shards; the commonest, so it calls nothing of ndtp's
        if _level() is not None:
            raise TransformedError
        return _GIVEN.__get__(None, cls)(*args, **kwargs)
    before = uses()
    result = _ruled(cls, args, kwargs)
    rows = at_work()
    if cls.__module__.startswith("torch.distributed."):
        for node in _nodes(result):
            node.register_prehook(_contiguous)
    if rows is not None and uses() != before:  # its backward finds the same default process group as its forward
        for node in _nodes(result):
            node.register_prehook(partial(_begin, rows))
            node.register_hook(rows.end)
    return result


def _nodes(result: Any) -> set[Any]:
    return {x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None}


def _begin(rows: OwnRows, grads: Any) -> Any:
    rows.begin()
    return _contiguous(grads)


def _contiguous(grads: Any) -> Any:
    """The gradients that a backward gets which sends some: gloo takes the memory of what is not contiguous as it is."""
    return tuple(grad if grad is None else grad.contiguous() for grad in grads)


def _ruled(cls: Any, args: Arguments, kwargs: Keywords) -> Any:
    if cls is CheckpointFunction:
        return _given(_Checkpoint, *map(_computed, args), **kwargs)
    if cls is _SAVES_INPUTS:
        return _saved_inputs(*map(_computed, args))
    for take in () if cls.__module__.startswith("torch.") else OTHER_KINDS:  # a backward hook's hands its inputs on
        result = take(_Named(cls), partial(_given, cls) if TABLE.get(cls) is elementwise else None, args, kwargs)
        if result is not NotImplemented:
            return result
    if not split_in(args):
        kind = cls if at_work() is None or cls.__module__.startswith(_OURS) else _giving_wholes(cls)
        return _given(kind, *args, **kwargs)
    made = TABLE.get(cls)
    if made is not None:
        result = made(cls.apply, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return on_whole(_Named(cls), args, kwargs)


_backward_of_torch = CheckpointFunction.backward


class _Checkpoint(CheckpointFunction):
    """A checkpoint of code that calls split layers: what they only noted so far is computed before it leaves.

    Autograd ties a gradient to the very tensor that `forward` gives.
    """

    @staticmethod
    def forward(ctx: AutogradContext, *args: Any) -> Any:
        given = [x for x in args if isinstance(x, Tensor)]
        rows = at_work()
        ctx.ndtp_again, ctx.ndtp_forms = None if rows is None else rows.while_running(), _forms(given)
        result = CheckpointFunction.forward(ctx, *args)
        # Of a tensor that comes back autograd makes a view, which has no form.
        return mapped(result, lambda x: x.view_as(x) if any(x is y for y in given) else _computed(x), Tensor)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Any) -> Any:
        """The gradients that its inputs have kept, which autograd wants as shards without a form."""
        run = partial(_backward_of_torch, _InForm(ctx))
        kept = (run if ctx.ndtp_again is None else ctx.ndtp_again(run))(*grads)
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in kept)


class _InForm:
    """A view of what a checkpoint has kept, with split tensors as they were: hooks of an outer one keep shards."""

    def __init__(self, ctx: AutogradContext) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def saved_tensors(self) -> list[object]:
        return _with_forms(self._ctx.saved_tensors, self._ctx.ndtp_forms)


def _computed(x: Any) -> object:
    return x.now() if hasattr(type(x), "now") else x


@cache
def _giving_wholes(cls: Any) -> Any:
    """The `autograd.Function` with whole results and gradients: its code may call split layers itself."""

    def whole_of(method: Any) -> Any:
        return staticmethod(lambda *args, **kwargs: mapped(method(*args, **kwargs), whole))

    own = [name for name in ("forward", "backward", "vjp") if getattr(cls, name) is not getattr(Function, name)]
    methods = {name: whole_of(getattr(cls, name)) for name in own}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})


class _Named:
    """An `autograd.Function` on whole tensors, by its name."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.__name__ = kind, kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _given(_giving_wholes(self.kind), *args, **kwargs)


def _at_work_again(init: Any) -> Any:
    """Let the code of a model that a checkpoint runs again run as in the model's forward."""

    def made(frame: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        rows = at_work()
        init(frame, recompute_fn if rows is None else rows.while_running()(recompute_fn), *args, **kwargs)

    return made


def _of_computed(save_inputs: Any) -> Any:
    """Let a checkpoint save split tensors that are computed: one that is not becomes another in memory."""

    def save(frame: Any, *args: Any) -> None:
        args = tuple(_computed(x) if isinstance(x, Tensor) else x for x in args)
        frame.ndtp_forms = _forms(args)
        save_inputs(frame, *args)

    return save


def _in_form(get_inputs: Any) -> Any:
    """Let a checkpoint inside of another one get split tensors: hooks of the outer one have kept their shards alone."""

    def get(frame: Any) -> list[Any]:
        given = list(get_inputs(frame))
        return _with_forms(given, getattr(frame, "ndtp_forms", None) or [None] * len(given))

    return get


def _saved_inputs(*args: Any) -> Any:
    """Save the inputs of a checkpoint as torch 2.11 does, which asks for them by a function that it keeps."""
    made = _given(_SAVES_INPUTS, *args)
    if (node := made.grad_fn) is not None:
        get_args, forms = node.get_args, _forms(args[1:])  # the first one is no input
        node.get_args = lambda saved: _with_forms(get_args(saved), forms)
    return made


def _forms(inputs: Sequence[Any]) -> list[Any]:
    return [x.form() if hasattr(type(x), "form") else None for x in inputs]


def _with_forms(saved: Sequence[Any], forms: Sequence[Any]) -> list[Any]:
    """Return inputs as they were given, of which hooks may have kept the shards alone."""
    return [
        x if form is None or type(x) is not Tensor else form.enter(x.view_as(x))
        for x, form in zip(saved, forms, strict=True)
    ]


def guard_functions(model: nn.Module | None = None) -> None:
    """Let every `autograd.Function` that has no rule take split tensors whole, also one that a model holds already."""
    replaced("torch.autograd.Function.apply", lambda given: classmethod(_apply))
    replaced("torch.utils.checkpoint._CheckpointFrame.__init__", _at_work_again)
    if hasattr(_CheckpointFrame, "save_inputs"):
        replaced("torch.utils.checkpoint._CheckpointFrame.save_inputs", _of_computed)
        replaced("torch.utils.checkpoint._CheckpointFrame.get_inputs", _in_form)
    guard_collectives()
    whole_in_scripts_and_transforms()
    for held in () if model is None else _namespaces(model):
        for name, value in list(held.items()):
            if type(value) in _METHODS and _is_apply(value):
                held[name] = value.__self__.apply


def _namespaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a model's modules, and those of the Python modules that define their classes or a
    function of autograd: each may hold an `apply` from before (`quantize = Quantize.apply`).
    """
    yield from map(vars, model.modules())
    kinds = {kind for part in model.modules() for kind in type(part).__mro__} | {*_below(Function)}
    for name in {kind.__module__ for kind in kinds}:
        if name.partition(".")[0] not in ("torch", "builtins", "ndtp") and name in sys.modules:
            yield vars(sys.modules[name])


def _below(kind: Any) -> Iterator[object]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _is_apply(value: Any) -> bool:
    kind = value.__self__
    return isinstance(kind, type) and issubclass(kind, Function) and value.__name__ == "apply"
