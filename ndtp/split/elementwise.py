"""Functions that act element by element, with broadcasting: whole operands are sliced, others are brought along."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.compute.constants import constant_on
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.split.copies import as_view, share_memory, version_of, written
from ndtp.split.moving import brought, moved, section_order
from ndtp.split.spec import Axes, Context, Spec, layout_of
from ndtp.split.tensor import SplitTensor, enter, leave, like, rule, split_in, strides_of, writes

# By name: as functions of torch and of torch.nn.functional, as methods, in place (`relu_`) and as operators.
NAMES = (
    "abs", "absolute", "acos", "acosh", "add", "addcdiv", "addcmul", "and", "angle", "asin", "asinh", "atan", "atan2",
    "atanh", "arctan2", "bfloat16", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "byte", "ceil",
    "celu", "char", "clamp", "clamp_max", "clamp_min", "clip", "clone", "complex", "conj", "contiguous", "copysign",
    "cos", "cosh", "cpu", "cuda", "deg2rad", "detach", "digamma", "div", "divide", "double", "elu", "eq", "erf",
    "erfc", "erfinv",
    "exp", "exp2", "expm1", "fill", "float", "float_power", "floor", "floor_divide", "floordiv", "fmax", "fmin", "fmod",
    "frac", "ge", "gelu", "greater", "greater_equal", "gt", "half", "hardshrink", "hardsigmoid", "hardswish",
    "hardtanh", "heaviside", "hypot", "int", "invert", "isclose", "isfinite", "isinf", "isnan", "ldexp", "le",
    "leaky_relu", "lerp", "less", "less_equal", "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logaddexp2",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logsigmoid", "long", "lt", "masked_fill",
    "maximum", "minimum", "mish", "mod", "mul", "multiply", "nan_to_num", "ne", "neg", "negative", "nextafter",
    "not_equal", "ones_like", "or", "polar", "pos", "positive", "pow", "rad2deg", "reciprocal", "relu",
    "relu6", "remainder", "resolve_conj", "resolve_neg", "round", "rpow", "rrelu_eval", "rsqrt", "rsub", "selu", "sgn",
    "short", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "softsign", "sqrt",
    "square", "sub", "subtract", "tan", "tanh", "tanhshrink", "threshold", "to", "to_dense", "true_divide", "truediv",
    "trunc", "type", "type_as", "where", "xlogy", "xor", "zero", "zeros_like", "full_like", "empty_like", "copy",
    "alias",
)  # fmt: skip
# What is infinite at zero, or has an infinite slope there, such as the zeros of padding are.
SINGULAR = (
    "acosh", "addcdiv", "arctan2", "atan2", "digamma", "div", "divide", "float_power", "floor_divide", "floordiv",
    "fmod", "hypot", "lgamma", "log", "log10", "log2", "logit", "mod", "pow", "reciprocal", "remainder", "rpow",
    "rsqrt", "sqrt", "true_divide", "truediv", "xlogy",
)  # fmt: skip
# What puts numbers of the code's choice into a tensor, -inf for example, and so into padding.
FILLS = ("fill", "full_like", "masked_fill", "where")
PLACES = (torch, F, torch._C._nn, Tensor, torch.special)


def named(names: Iterable[str]) -> list[Any]:
    """The functions of torch that have one of these names, in place and as operators as well."""
    forms = [form for name in names for form in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")]
    return [getattr(place, form) for place in PLACES for form in forms if hasattr(place, form)]


_SINGULAR, _FILLS, _LOGIT = set(named(SINGULAR)), set(named(FILLS)), set(named(["logit"]))


def without_padding(
    shard: Tensor, spec: Spec, dims: Sequence[int], number: float = 0.0, offset: int = 0
) -> Tensor:  # fmt: skip
    """Return the shard with a number in the place of the padding of some dims, which passes no gradient on.

    Args:
        offset: how many dims of `spec` the shard lacks in front.
    """
    for d in dims:
        if spec.padded[d] != spec.sizes[d]:
            here = spec.here(d)
            real = max(0, min(spec.sizes[d], here.stop) - here.start)
            if real < len(here):
                mask = torch.arange(len(here), device=shard.device) < real
                mask = mask.view([-1 if offset + k == d else 1 for k in range(shard.dim())])
                shard = torch.where(mask, shard, torch.full((), number, dtype=shard.dtype, device=shard.device))
    return shard


def with_finite(shard: Tensor, spec: Spec, sizes: Sequence[int], number: float = 1.0) -> Tensor:
    """The shard of an operand of these sizes with a number in the place of padding.

    Infinities and what is no number would come from padding into the gradients of weights: zero times them is none.

    Args:
        spec: of the result.
    """
    offset = len(spec.sizes) - len(sizes)
    dims = [offset + d for d, size in enumerate(sizes) if size == spec.sizes[offset + d]]
    return without_padding(shard, spec, dims, number, offset)


def broadcast_target(
    operands: Sequence[Tensor], sizes: Sequence[int], first: SplitTensor | None = None
) -> tuple[Context, list[Axes], list[int], tuple[int, ...], str] | None:
    """Return where the operands of a function with broadcasting meet: axes and padded sizes of each dim of its
    result.

    The largest split operand stays where it is, others follow it; `first` does so before all.
    """
    mine = sorted((x for x in operands if isinstance(x, SplitTensor)), key=lambda x: -math.prod(x.spec.local))
    if first is not None:
        mine = [first, *(x for x in mine if x is not first)]
    dims: list[Axes] = [()] * len(sizes)
    padded, taken = list(sizes), set[str]()
    sections: tuple[int, ...] = ()
    for x in mine:
        spec, offset = x.spec, len(sizes) - len(x.spec.sizes)
        for dim, axes in enumerate(spec.dims):
            out = offset + dim
            if axes and not dims[out] and spec.sizes[dim] == sizes[out] and not taken & set(axes):
                dims[out], padded[out] = axes, spec.padded[dim]
                taken |= set(axes)
                if spec.sections and dim == len(spec.dims) - 1:
                    sections = spec.sections
    return mine[0].spec.context, dims, padded, sections, mine[0].spec.origin


def aligned(
    x: Tensor, context: Context, dims: Sequence[Axes], padded: Sequence[int], sizes: Sequence[int],
    sections: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """The shard of an operand that goes with a result which lies with `dims`; a dim of size 1 is the same for all."""
    offset = len(sizes) - x.dim()
    shape = tuple(x.shape)
    mine = [axes if shape[i] == sizes[offset + i] else () for i, axes in enumerate(dims[offset:])]
    wide = [padded[offset + i] if mine[i] else shape[i] for i in range(len(shape))]
    used = tuple(axis for axes in dims for axis in axes)
    if sections and mine and mine[-1]:
        if isinstance(x, SplitTensor) and x.spec.sections == sections and x.spec.dims[-1] == mine[-1]:
            return brought(x, context, mine, wide, used, sections=sections)
        if isinstance(x, SplitTensor):
            x = _whole_last(x)
            count = context.mesh.grid.size(mine[-1])
            bare = leave(x).index_select(-1, constant_on(section_order(sections, count), x.device))
            x = enter(bare, x.spec)
            return brought(x, context, mine, wide, used)
        count = context.mesh.grid.size(mine[-1])
        return brought(
            x.index_select(-1, constant_on(section_order(sections, count), x.device)), context, mine, wide, used
        )
    return brought(x, context, mine, wide, used)


def _whole_last(x: SplitTensor) -> SplitTensor:
    return moved(x, (*x.spec.dims[:-1], ()))


@rule(*named(NAMES), torch.ops.aten.detach.default)  # the latter from a checkpoint under a dispatch mode
def elementwise(func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
    """Each rank computes its part of the result, which lies as the largest operand does."""
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if len(split_in([*args, *kwargs.values()])) != sum(isinstance(x, SplitTensor) for x in operands):
        return NotImplemented
    into = (args[0] if args else kwargs.get("input")) if writes(func) else None
    if into is not None and not isinstance(into, SplitTensor):
        return NotImplemented
    if func in (Tensor.to, Tensor.type_as) and len(operands) == 2:
        # The second tensor tells a dtype and a device, and no more.
        other = operands[1]
        rest = [x for x in args[1:] if x is not other]
        return Tensor.to(
            args[0], other.device, other.dtype, *rest, **{k: x for k, x in kwargs.items() if x is not other}
        )
    if len(operands) == 1:
        return _of_one(func, args, kwargs)
    try:
        sizes = torch.broadcast_shapes(*(x.shape for x in operands))
    except RuntimeError:
        return NotImplemented  # the dense function says what is wrong
    found = broadcast_target(operands, sizes, into)
    if found is None:
        return NotImplemented
    context, dims, padded, sections, origin = found
    if into is not None and (tuple(into.spec.sizes) != tuple(sizes) or tuple(dims) != into.spec.dims):
        return NotImplemented

    def bring(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if into is not None and x is into:
            return leave(into)
        if type(x) is Tensor and x.dim() == 0 and not x.requires_grad:
            return x
        return aligned(x, context, dims, padded, sizes, sections)

    spec = Spec(context, tuple(sizes), layout_of(context.mesh, dims), tuple(padded), sections, origin)
    given, named_ones = [bring(x) for x in args], {k: bring(x) for k, x in kwargs.items()}
    if func in _SINGULAR and spec.is_padded:
        is_filled = lambda y: isinstance(y, Tensor) and y.dim() and y is not into  # noqa: E731
        filled = lambda x, y: with_finite(x, spec, y.shape) if is_filled(y) else x  # noqa: E731
        given = [filled(x, y) for x, y in zip(given, args, strict=True)]
        named_ones = {k: filled(x, kwargs[k]) for k, x in named_ones.items()}
    made = _result(func, given, named_ones, spec, into)
    if into is None and made is not NotImplemented and any(x.strides is not None for x in split_in(operands)):
        first = next((x for x in operands if tuple(x.shape) == spec.sizes), None)
        made.strides = strides_of(first) if isinstance(first, SplitTensor) else None
    return made


def _of_one(func: TorchFunction, args: Arguments, kwargs: Keywords) -> Any:
    """Apply a function of one tensor and numbers."""
    x = next(x for x in (*args, *kwargs.values()) if isinstance(x, SplitTensor))
    into = x if writes(func) or kwargs.get("inplace") or any(y is True for y in args[1:]) else None
    bare = leave(x)
    if func in _SINGULAR and x.spec.is_padded and into is None:
        bare = with_finite(bare, x.spec, x.spec.sizes, 0.5 if func in _LOGIT else 1.0)
    given = [bare if y is x else y for y in args]
    made = _result(
        func, given, {k: bare if y is x else y for k, y in kwargs.items()}, x.spec, x if into is None else into
    )
    if made is not x and made is not NotImplemented and not (x.link is None and x.strides is None):
        if share_memory(made, x):  # detached, say
            made.strides = x.strides
            return as_view(made, x)
        made.strides = strides_of(x)
    return made


def _filled(result: Tensor, spec: Spec, is_in_place: bool) -> Tensor:
    """Return a result with finite padding; a new leaf of autograd, which is to be no result of another, as it is."""
    if not is_in_place and result.is_leaf and result.requires_grad:
        return result
    finite = with_finite(result, spec, spec.sizes)
    return result.copy_(finite) if is_in_place and finite is not result else finite


def _result(func: Any, args: Sequence[Any], kwargs: dict[str, Any], spec: Spec, into: SplitTensor | None) -> Any:
    before = None if into is None else version_of(into)
    result = func(*args, **kwargs)
    if func in _FILLS and isinstance(result, Tensor) and spec.is_padded and torch.is_grad_enabled():
        is_in_place = any(result is x for x in (*args, *kwargs.values()))
        result = _filled(result, spec, is_in_place) if tuple(result.shape) == spec.local else result
    if into is not None and any(result is x for x in (*args, *kwargs.values())):
        if writes(func) or version_of(into) != before:
            written(into)
        return into  # in place, or nothing to do
    if not isinstance(result, Tensor) or tuple(result.shape) != spec.local:
        return NotImplemented
    if any(result is x for x in (*args, *kwargs.values())):
        result = result.view_as(result)
    return enter(result, spec)


@rule(torch.rand_like, torch.randn_like, torch.randint_like)
def _random(func: TorchFunction, x: SplitTensor, *args: Any, **kwargs: Any) -> object:
    """The numbers that the dense model would draw, whole on every rank: ranks have one seed.

    They are drawn in the order of memory, so the tensor that they are drawn for has the strides of the dense one.
    """
    if not isinstance(x, SplitTensor):
        return NotImplemented
    return func(torch.empty_strided(x.spec.sizes, like(x).stride(), dtype=x.dtype, device=x.device), *args, **kwargs)


@rule(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor)
def _new(func: TorchFunction, x: SplitTensor, *args: Any, **kwargs: Any) -> object:
    """A new tensor of other sizes is whole."""
    return func(leave(x), *args, **kwargs)
