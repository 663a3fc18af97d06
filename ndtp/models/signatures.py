"""The signatures of methods that are called for each layer of each step: found once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor

from ndtp.errors import LayoutError
from ndtp.nn.sharded import Sharded
from ndtp.runtime.facts import is_strided

OF_TORCH = (Tensor, NestedTensor)  # which may be no block of memory


class NamedArguments:
    """The arguments of a call by their names, as `inspect.BoundArguments` has them.

    Attributes:
        arguments: those that are given; the names that a function takes as `**kwargs` are in a dict of their own.
    """

    __slots__ = ("_form", "arguments")

    def __init__(self, form: CallForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._form = form
        self.arguments: dict[str, Any] = dict(zip(form.by_place, args, strict=True))
        for name in form.by_name:
            self.arguments[name] = kwargs[name]
        if form.others:
            self.arguments[form.rest] = {name: kwargs[name] for name in form.others}

    @property
    def args(self) -> list[Any]:
        return [self.arguments[name] for name in self._form.by_place]

    @property
    def kwargs(self) -> dict[str, Any]:
        form, arguments = self._form, self.arguments
        named = {name: arguments[name] for name in form.by_name}
        return named | arguments[form.rest] if form.others else named


class CallForm:
    """The form in which a function is called: how many arguments by place, and the names of the others.

    Attributes:
        by_place, by_name: the names of parameters.
        others: names that the function takes as `**kwargs`, in the parameter `rest`.
    """

    def __init__(self, bound: inspect.BoundArguments, count: int, names: Sequence[str]) -> None:
        parameters = bound.signature.parameters
        self.by_place = tuple(parameters)[:count]
        self.by_name = [name for name in names if name in bound.arguments and _is_named(parameters[name])]
        self.others = [name for name in names if name not in self.by_name]
        self.rest = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), "")


class Signature:
    """A function's signature, with the forms in which it was called: `bind` derives each of them once."""

    def __init__(self, names: inspect.Signature) -> None:
        self.names = names
        self._forms: dict[tuple[int, tuple[str, ...]], CallForm] = {}
        self._takes_any_count = any(p.kind is p.VAR_POSITIONAL for p in names.parameters.values())

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NamedArguments | inspect.BoundArguments:
        """Return the arguments of a call.

        Raises:
            TypeError: the function does not take them.
        """
        if self._takes_any_count:
            return self.names.bind(*args, **kwargs)
        key = len(args), tuple(kwargs)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = CallForm(self.names.bind(*args, **kwargs), *key)
        return NamedArguments(form, args, kwargs)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def signature_of(method: Any) -> Signature:
    """Return the signature of a bound method, without `self`, or of a function."""
    function = getattr(method, "__func__", None)
    return Signature(inspect.signature(method)) if function is None else _without_self(function)


@cache
def _without_self(function: Any) -> Signature:
    whole = inspect.signature(function)
    return Signature(whole.replace(parameters=list(whole.parameters.values())[1:]))


def input_by_name(layer: nn.Module, given: Any, named: Mapping[str, Any]) -> Any:
    """Return the one input of a split layer that was called by keyword, by the name that its own class has for it.

    Raises:
        TypeError: the class has no such name, or there is more than one argument, as of the dense layer.
    """
    kinds: Iterator[Any] = (kind for kind in type(layer).__mro__ if not issubclass(kind, Sharded))
    own = next(kind for kind in kinds if "forward" in vars(kind))  # nn.Module has one that takes nothing by name
    bound = _without_self(own.forward).bind(() if given is None else (given,), named)
    if len(bound.arguments) != 1 or named.keys() != bound.arguments.keys():
        raise TypeError(f"{type(layer).__name__} takes one argument, and was called with {', '.join(named)} beside it")
    return next(iter(named.values()))


def as_dense_input(x: Any, name: str) -> Any:
    """Return the input of a split layer, which dense layers take sparse, too, as one that ranks can have parts of.

    Raises:
        LayoutError: it is nested.
    """
    if is_strided(x):
        return x
    if x.is_nested:
        raise LayoutError(
            f"'{name}': its input is a nested tensor, of whose rows ranks cannot have equal parts\n"
            "  fix: torch.nested.to_padded_tensor(x, 0.0), and a mask for the padding"
        )
    return x.to_dense()
