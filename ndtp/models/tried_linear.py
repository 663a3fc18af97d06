"""Does a subclass of `nn.Linear` with code of its own compute what an `nn.Linear` does?

Many libraries have such a class: one that begins with other numbers, or casts its weight to the dtype of the input.
Its code is read, since a trial cannot know on what else a result depends, and then tried on a few numbers.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

_LEADS = ((5,), (2, 3))
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
_UNDER_AUTOCAST = (
    (torch.float32,) * 2,
    (torch.bfloat16,) * 2,
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
# By class, its code, and whether it has a bias: whether it computes a Linear without autocast, and under it.
_FOUND: WeakKeyDictionary[type, dict[Any, tuple[bool, bool]]] = WeakKeyDictionary()

# All that code may name which is taken for that of a Linear: its parameters, products, and dtypes.
_GLOBALS = {"torch": torch, "nn": nn, "F": F, "functional": F, "linear": F.linear, "super": super}
_CASTS = {"dtype", "to", "type", "type_as"}
_NAMES = {*_GLOBALS, "matmul", "T", "t", "mT", "forward", "weight", "bias", "input"}


def computes_linear(module: nn.Linear, casts: bool = False) -> bool:
    """Return whether the code of a layer gives x W^T + b for all inputs of the weight's dtype, and the gradients of it.

    Args:
        casts: whether it may do something else under autocast, and with inputs of another dtype.
    """
    kind, own = type(module), vars(module)
    weight = own["_parameters"].get("weight")
    if weight is None or not own["_parameters"].keys() <= {"weight", "bias"} or own["_buffers"] or own["_modules"]:
        return False
    sizes = own.get("out_features"), own.get("in_features")
    if tuple(weight.shape) != sizes or not weight.is_floating_point():
        return False
    classes = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    if any(each.__module__.startswith("torch.") for each in classes):
        return False  # whose weights torch's code reads past them
    if _has_own_attributes(own, *map(vars, classes)) or not _has_code_of_a_module(kind):
        return False
    forwards = [vars(each)["forward"] for each in classes if "forward" in vars(each)]
    if not all(_is_plain(forward, casts) for forward in forwards):
        return False
    return not forwards or (_tried(module)[0] if casts else all(_tried(module)))


def computes_under_autocast(module: nn.Linear) -> bool:
    """Return whether a layer that computes a Linear gives what an `nn.Linear` does under autocast, its dtype too."""
    return type(module).forward is nn.Linear.forward or _tried(module)[1]


def _tried(module: nn.Linear) -> tuple[bool, bool]:
    kind: Any = type(module)
    codes = tuple(getattr(vars(each).get("forward"), "__code__", None) for each in kind.__mro__)
    found, key = _FOUND.setdefault(kind, {}), (module.bias is None, codes)
    if key not in found:
        found[key] = _is_linear_in_trials(module, False), _is_linear_in_trials(module, True)
    return found[key]


def _has_own_attributes(*namespaces: Mapping[str, object]) -> bool:
    """Return whether what the code names may be something else than of torch: of a layer, or of its classes."""
    own = {*namespaces[0], *(name for names in namespaces[1:] for name in names if name != "forward")}
    return not own.isdisjoint(_NAMES | _CASTS)


def _has_code_of_a_module(kind: object) -> bool:
    """Return whether torch's own code calls a layer of a class and finds its parameters."""
    return all(getattr(kind, x) is getattr(nn.Module, x) for x in ("__call__", "__getattr__", "__getattribute__"))


def _is_plain(forward: object, casts: bool) -> bool:
    """Return whether code names nothing but an input and a Linear's parameters, products of them, and dtypes."""
    if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__") or forward.__kwdefaults__:
        return False
    code = forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return False
    if not {*code.co_names} <= {*_NAMES, *(_CASTS if casts else ())} or not {*code.co_freevars} <= {"__class__"}:
        return False
    read = _globals_of(code)
    if (
        read is None
        or not read <= _GLOBALS.keys()
        or not all(x is None or x == forward.__doc__ or _is_names(x) for x in code.co_consts)
    ):
        return False
    found = {name: forward.__globals__.get(name, getattr(builtins, name, None)) for name in read}
    return all(value is _GLOBALS[name] for name, value in found.items())


@cache
def _globals_of(code: types.CodeType) -> frozenset[str] | None:
    """Return the names that code takes from outside; None where it changes what it did not make."""
    steps = list(dis.get_instructions(code))
    if any(step.opname.startswith(("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE")) for step in steps):
        return None
    return frozenset(step.argval for step in steps if step.opname == "LOAD_GLOBAL")


def _is_names(x: object) -> bool:
    """Return whether a constant is the names of arguments."""
    return isinstance(x, tuple) and all(name in (*_NAMES, "dtype") for name in x)


def _is_linear_in_trials(module: nn.Linear, is_cast: bool) -> bool:
    """Run layers of the same class with numbers and few features of their own."""
    try:
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            dtypes = _UNDER_AUTOCAST if is_cast else [(dtype, dtype) for dtype in _ROUNDING]
            return all(_is_same(*trial, is_cast) for trial in _trials(module, dtypes))
    except Exception:  # code that gives something else than a tensor, or wants more dims
        return False


def _trials(
    module: nn.Linear, dtypes: Sequence[tuple[torch.dtype, torch.dtype]]
) -> Iterator[tuple[object, Tensor, list[Tensor]]]:
    """Yield a layer, an input, and the layer's parameters, for dtypes of an input and of parameters."""
    generator = torch.Generator("cpu").manual_seed(0)
    inside, outside = 5, 3
    for (dtype, own_dtype), lead in product(dtypes, _LEADS):
        shapes = [(*lead, inside), (outside, inside)] + [(outside,)] * (module.bias is not None)
        drawn = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
        x, parameters = drawn[0].to(dtype).requires_grad_(), [each.to(own_dtype) for each in drawn[1:]]
        layer = type(module).__new__(type(module))
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = inside, outside
        own = dict(zip(("weight", "bias"), [*map(nn.Parameter, parameters), None], strict=False))
        vars(layer)["_parameters"] = own
        yield layer, x, [p for p in own.values() if p is not None]


def _is_same(layer: Any, x: Tensor, parameters: list[Tensor], is_cast: bool) -> bool:
    """Return whether a layer gives what an `nn.Linear` with its parameters does, perhaps with products of 16 bits."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
        y, expected = layer.forward(x), F.linear(x, *parameters)
    if type(y) is not Tensor or (y.shape, y.dtype) != (expected.shape, expected.dtype) or not y.requires_grad:
        return False
    slope = torch.linspace(-1, 1, y.numel(), device="cpu").view(y.shape).to(y.dtype)
    operands = [x, *parameters]
    mine, theirs = (torch.autograd.grad(each, operands, slope, allow_unused=True) for each in (y, expected))
    rounding = _ROUNDING[y.dtype]
    return all(
        a is not None and bool((a - b).abs().max() <= rounding * b.abs().max())
        for a, b in zip((y, *mine), (expected, *theirs), strict=True)
    )
