"""Functions along dims, which are whole for them while others stay split; sums over split dims go over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.compute.torch_calls import Keywords, TorchFunction
from ndtp.ops.reductions import sum_over
from ndtp.split.elementwise import elementwise, without_padding
from ndtp.split.moving import brought
from ndtp.split.spec import Axes, Spec, layout_of
from ndtp.split.tensor import SplitTensor, dims_given, enter, integers, leave, like, rule, split_in, writes
from ndtp.split.views import with_dims_at, without
from ndtp.split.whole import whole


def functions(*names: str) -> list[object]:
    return [getattr(place, name) for place in (torch, Tensor, F) for name in names if hasattr(place, name)]


# Those that look along one dim, or some; where their argument `dim` stands behind the tensor, and its default.
ALONG = {
    0: (
        "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "amax", "amin", "argmax", "argmin", "argsort",
        "logsumexp", "prod", "any", "all", "max", "min", "median", "mode", "sort", "flip",
        "aminmax", "nanmean", "nansum", "cummax", "cummin", "std", "var", "std_mean", "var_mean", "softmin",
        "_softmax", "count_nonzero", "fliplr", "flipud",
    ),
    1: ("topk", "kthvalue", "roll", "norm", "quantile", "renorm", "repeat_interleave", "unfold_dim"),
}  # fmt: skip
POSITION = {
    "topk": (1, -1), "kthvalue": (1, -1), "roll": (1, None), "norm": (1, None), "repeat_interleave": (1, None),
    "quantile": (1, None), "argsort": (0, -1), "sort": (0, -1), "median": (0, None), "mode": (0, -1), "kth": (1, -1),
    "diff": (1, -1), "softmax": (0, None), "log_softmax": (0, None), "fliplr": (9, 1), "flipud": (9, 0),
    "renorm": (1, None), "cumsum": (0, None), "glu": (0, -1),
}  # fmt: skip
ONE_BY_ONE = {"flip", "count_nonzero"}  # take dims without brackets, too
OF_NONE = {"flip", "any", "all"}  # for which no dims are none, and not all
NAMED = {name for names in ALONG.values() for name in names} | {"glu"}


def dims_of(func: TorchFunction, count: int, args: Sequence[object], kwargs: Keywords) -> list[int]:
    """The dims along which a function looks, all where it names none; `args` are those behind the tensor."""
    name = func.__name__
    place, default = POSITION.get(name, (0, None))
    given = args[place] if place < len(args) else default
    if name in ONE_BY_ONE and len(args) > 1:
        given = args
    dim = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis", given)))
    dims = dims_given(dim, count)
    if not dims and (dim is None or isinstance(dim, bool) or name not in OF_NONE):
        return list(range(count))
    # Each part of the dim that `renorm` names has its norm over all others.
    return [d for d in range(count) if d not in dims] if name == "renorm" else dims


@rule(*functions(*NAMED))
def along(func: TorchFunction, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function along dims that are whole for it; results have these dims, or lack them."""
    if not isinstance(x, SplitTensor) or split_in([*args, *kwargs.values()]) or kwargs.get("out") is not None:
        return NotImplemented
    count = len(x.spec.sizes)
    if not count:
        return func(whole(x), *args, **kwargs)
    dims = dims_of(func, count, args, kwargs)
    if x.requires_grad and torch.is_grad_enabled() and not writes(func):
        x = _of_finite_padding(x, [d for d in range(count) if d not in dims])
    fractions = kwargs.get("q", args[0] if args else None) if func.__name__ == "quantile" else None
    if isinstance(fractions, Tensor) and fractions.dim():  # several of them are a dim in front
        return NotImplemented
    if any(x.spec.dims[d] for d in dims):
        made = _over_split(func, x, dims, args, kwargs)
        if made is not NotImplemented:
            return made
        x = without(x, dims)
    if x.spec.sections:
        x = without(x, [count - 1])
    result = func(leave(x), *args, **kwargs)
    return _entered(result, x.spec, dims)


def _of_finite_padding(x: SplitTensor, dims: Sequence[int]) -> SplitTensor:
    """Return the tensor with zeros for the padding of some dims, which passes no gradient on.

    Code may have put -inf there, of which a softmax makes NaN; the gradients of weights would have that times zero.
    """
    shard = leave(x)
    real = without_padding(shard, x.spec, dims)
    return x if real is shard else enter(real, x.spec)


@rule(torch.diff, Tensor.diff)
def differences(
    func: TorchFunction, x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> object:
    """Differences along a dim of what is joined along it."""
    parts = [part for part in (prepend, x, append) if part is not None]
    return along(func, torch.cat(parts, dim) if n and len(parts) > 1 else x, n, dim)


@rule(*[getattr(place, name) for place in (torch, Tensor) for name in ("max", "min")])
def _extremes(func: TorchFunction, *args: object, **kwargs: object) -> object:
    """Element by element where both operands are tensors, else along a dim."""
    if len(args) == 2 and isinstance(args[1], Tensor) and not kwargs:
        return elementwise(func, *args)
    return along(func, *args, **kwargs)


def _entered(result: Any, spec: Spec, dims: Sequence[int]) -> Any:
    if not isinstance(result, Tensor):
        made = [_entered(each, spec, dims) for each in result]
        return type(result)(made)
    count = len(spec.sizes)
    if result.dim() == count:
        where: list[int | None] = list(range(count))
    elif result.dim() == count - len(set(dims)):
        rest = [d for d in range(count) if d not in dims]
        where = [rest.index(d) if d in rest else None for d in range(count)]
    else:
        return result
    sizes = list(result.shape)
    for d in range(count):
        if where[d] is not None and d not in dims:
            sizes[where[d]] = spec.sizes[d]  # type: ignore[index]
    if not spec.axes and not sizes:
        return result
    return enter(result.view_as(result), with_dims_at(spec, sizes, where))


def _over_split(func: TorchFunction, x: SplitTensor, dims: list[int], args: Sequence[Any], kwargs: Keywords) -> object:
    """Apply a function along dims that axes split: its statistics move, and not the tensor."""
    name = func.__name__
    if name in ("var", "std"):
        return _variance(name, x, dims, args, kwargs)
    if name in ("any", "all") and x.dtype == torch.bool:
        keepdim = bool(kwargs.get("keepdim", args[1] if len(args) > 1 else False))
        count = total((x if name == "any" else ~x).to(torch.int32), dims, keepdim)
        return count > 0 if name == "any" else count == 0
    return NotImplemented


def _variance(name: str, x: SplitTensor, dims: list[int], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the variance as the mean of squares of the distances from the mean."""
    known = {"dim", "correction", "unbiased", "keepdim"}
    if set(kwargs) - known or len(args) > 3:
        return NotImplemented
    if args and isinstance(args[0], bool):
        unbiased, keepdim = args[0], False
    else:
        unbiased = kwargs.get("unbiased", args[1] if len(args) > 1 else True)
        keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    correction = kwargs.get("correction", 1 if unbiased else 0)
    count = math.prod(x.spec.sizes[d] for d in dims)
    rest = x - total(x, dims, True) / count
    variance = total(_square(rest), dims, keepdim) / max(count - (1 if correction is None else correction), 0)
    return _root(variance) if name == "std" else variance


def total(x: Any, dims: Sequence[int], keepdim: bool, dtype: Any = None) -> Tensor:
    """The sum over some dims; what ranks along their axes have each for itself is summed."""
    spec, shard = x.spec, leave(x)
    if len(spec.sizes) - 1 in dims:  # the order of features has no part in their sum
        spec = replace(spec, sections=())
    shard = without_padding(shard, spec, dims)
    summed = shard.sum(tuple(dims), keepdim=keepdim, dtype=dtype) if dims else shard
    over = tuple(axis for d in dims for axis in spec.dims[d])
    keep = [() if d in dims else axes for d, axes in enumerate(spec.dims)]
    sizes = [1 if d in dims else size for d, size in enumerate(spec.sizes)]
    padded = [1 if d in dims else size for d, size in enumerate(spec.padded)]
    if not keepdim:
        rest = [d for d in range(len(spec.sizes)) if d not in dims]
        keep, sizes, padded = [keep[d] for d in rest], [sizes[d] for d in rest], [padded[d] for d in rest]
    layout = layout_of(spec.mesh, keep)
    if over:
        summed = sum_of_ranks(summed, layout, spec, spec.mesh.grid.nontrivial(over))
    if not layout.axes:
        return summed
    return enter(
        summed.view_as(summed), Spec(spec.context, tuple(sizes), layout, tuple(padded), spec.sections, spec.origin)
    )


def sum_of_ranks(shard: Tensor, layout: Layout, spec: Spec, axes: Axes) -> Tensor:
    """Return the sum over some axes of what ranks have each for itself, which lies as `layout` says.

    Args:
        spec: of the tensor that it was made of.
    """
    if shard.dim():
        return sum_over(shard.contiguous(), layout, axes, spec.mesh, f"{spec.origin} sum")
    return sum_over(shard.view(1), layout_of(spec.mesh, [()]), axes, spec.mesh, f"{spec.origin} sum").view(())


@rule(torch.sum, Tensor.sum, torch.mean, Tensor.mean)
def sums(func: TorchFunction, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, SplitTensor) or kwargs.get("out") is not None:
        return NotImplemented
    if not x.spec.sizes:
        return func(whole(x), *args, **kwargs)
    dim = args[0] if args else kwargs.get("dim", kwargs.get("axis"))
    keepdim = bool(args[1] if len(args) > 1 else kwargs.get("keepdim", False))
    dtype = kwargs.get("dtype")
    count = len(x.spec.sizes)
    dims = dims_given(dim, count) or list(range(count))
    if func in (torch.sum, Tensor.sum):
        return total(x, dims, keepdim, dtype)
    if dtype is not None:
        x = x.to(dtype)
    number = math.prod(x.spec.sizes[d] for d in dims)
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        return NotImplemented
    return total(x, dims, keepdim) / number


@rule(torch.norm, Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm)
def norms(func: TorchFunction, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The 2-norm and 1-norm of split dims by sums; others see these dims whole."""
    if not isinstance(x, SplitTensor) or kwargs.get("out") is not None:
        return NotImplemented
    if not x.spec.sizes:
        return func(whole(x), *args, **kwargs)
    names = ("ord" if func.__module__ == "torch._C._linalg" or "linalg" in func.__name__ else "p", "dim", "keepdim")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    p = given.get("p", given.get("ord", 2))
    p = 2 if p in (None, "fro") else p
    dim, keepdim, dtype = given.get("dim"), bool(given.get("keepdim", False)), given.get("dtype")
    count = len(x.spec.sizes)
    dims = dims_given(dim, count) or list(range(count))
    is_of_matrices = func is torch.linalg.norm and len(dims) == 2 and given.get("ord") not in (None, "fro")
    if p not in (1, 2, 1.0, 2.0) or is_of_matrices or not any(x.spec.dims[d] for d in dims):
        x = without(x, dims)
        bare = func(leave(x), *args, **kwargs)
        return _entered(bare, x.spec, dims)
    if dtype is not None:
        x = x.to(dtype)
    if p in (1, 1.0):
        return total(x.abs(), dims, keepdim)
    return _root(total(_square(x), dims, keepdim))


def _square(x: Tensor) -> Any:
    """Square the magnitudes of numbers, which may be complex."""
    size = x.abs() if x.is_complex() else x
    return size * size


def _root(squares: Tensor) -> Tensor:
    """The square root, whose gradient at zero is zero, as that of torch's norm."""
    tiny = squares == 0
    return torch.where(tiny, squares * 0, torch.where(tiny, torch.ones_like(squares), squares).sqrt())


@rule(F.normalize)
def normalize(
    func: TorchFunction, x: object, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: object = None
) -> object:
    if not isinstance(x, SplitTensor) or out is not None:
        return NotImplemented
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


@rule(F.glu)
def glu(func: TorchFunction, x: object, dim: int = -1) -> object:
    if not isinstance(x, SplitTensor):
        return NotImplemented
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


@rule(F.cosine_similarity, torch.cosine_similarity)
def cosine(func: TorchFunction, a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> object:
    sizes = torch.broadcast_shapes(a.shape, b.shape)  # whose dim it is
    a, b = (x if x.shape == sizes else x.expand(sizes) for x in (a, b))
    both = [torch.linalg.vector_norm(x, 2, dim, keepdim=True).clamp_min(eps) for x in (a, b)]
    return ((a / both[0]) * (b / both[1])).sum(dim)


@rule(torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack)
def join(func: TorchFunction, parts: Sequence[Tensor], dim: int = 0, *, out: Any = None, **kwargs: Any) -> Any:
    """Join parts along a dim that is whole in all of them; in other dims they lie as the largest part."""
    dim = kwargs.get("axis", dim)
    if out is not None:
        return NotImplemented
    if func in (torch.hstack, torch.vstack):
        if func is torch.vstack:
            parts = [x[None] if x.dim() == 1 else x for x in parts]
        if any(x.dim() == 0 for x in parts):
            return NotImplemented
        return torch.cat(list(parts), 0 if func is torch.vstack or parts[0].dim() == 1 else 1)
    is_stack = func is torch.stack
    # An empty tensor of one dim goes with any others, as caches begin.
    parts = [x for x in parts if is_stack or isinstance(x, SplitTensor) or tuple(x.shape) != (0,)]
    count = parts[0].dim()
    at = dim % (count + is_stack)
    if len(parts) == 1 and not is_stack and isinstance(parts[0], SplitTensor):
        return enter(leave(parts[0]).clone(), parts[0].spec)
    bare = [
        like(x) if isinstance(x, SplitTensor) else torch.empty(x.shape, dtype=x.dtype, device="meta") for x in parts
    ]
    sizes = tuple(func(bare, dim).shape)
    mine = sorted((x for x in parts if isinstance(x, SplitTensor)), key=lambda x: -math.prod(x.spec.local))
    first = mine[0] if is_stack else without(mine[0], [at])
    spec = first.spec
    if spec.sections:
        first = without(first, [count - 1])
        spec = first.spec
    shards = [
        brought(
            x,
            spec.context,
            spec.dims,
            [p if a else s for p, a, s in zip(spec.padded, spec.dims, x.shape, strict=True)],
            (),
        )
        for x in parts
    ]
    where: list[int | None] = [d + (is_stack and d >= at) for d in range(count)]
    result = func(shards, dim)
    return enter(result, with_dims_at(spec, sizes, where))


@rule(torch.tril, Tensor.tril, torch.triu, Tensor.triu)
def triangle(func: TorchFunction, x: Any, diagonal: int = 0, *, out: object = None) -> object:
    """Keep a triangle, by the places in the last two dims."""
    if not isinstance(x, SplitTensor) or out is not None or len(x.spec.sizes) < 2:
        return NotImplemented
    kept = func(torch.ones(x.spec.sizes[-2:], dtype=torch.bool, device=x.device), diagonal)
    return torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device))


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def repeat(func: TorchFunction, x: object, *args: object, **kwargs: object) -> object:
    """Dims that are repeated once stay split."""
    if not isinstance(x, SplitTensor) or kwargs:
        return NotImplemented
    times = integers(args[0] if len(args) == 1 else args)
    count = len(x.spec.sizes)
    times = [1] * (count - len(times)) + times
    offset = len(times) - count
    x = without(x, [d for d in x.spec.split_dims if times[offset + d] != 1])
    result = leave(x).repeat(*times)
    sizes = list(like(x).repeat(*times).shape)
    return enter(result, with_dims_at(x.spec, sizes, [offset + d for d in range(count)]))


@rule(*[getattr(place, name) for place in (torch, Tensor) for name in ("gather", "index_select", "take_along_dim")])
def pick(func: TorchFunction, x: object, *args: object, **kwargs: object) -> object:
    """Pick along a dim that is whole; indices that are whole are cut as the tensor is."""
    along_dim = func in (torch.take_along_dim, Tensor.take_along_dim)
    names = ("indices", "dim") if along_dim else ("dim", "index")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    index, dim = given.get("index", given.get("indices")), given.get("dim")
    if not isinstance(x, SplitTensor) or dim is None or not isinstance(index, Tensor):
        return NotImplemented
    count = len(x.spec.sizes)
    (dim,) = dims_given(dim, count)
    x = without(x, [dim, *([count - 1] if x.spec.sections else [])])
    if index.dim() <= 1 and func in (torch.index_select, Tensor.index_select):
        result = leave(x).index_select(dim, whole(index))
        sizes = [result.shape[d] if d == dim else size for d, size in enumerate(x.spec.sizes)]
        return enter(result, with_dims_at(x.spec, sizes, list(range(count))))
    if index.dim() != count or (along_dim and any(index.shape[d] != x.spec.sizes[d] for d in range(count) if d != dim)):
        return NotImplemented
    x = without(x, [d for d in x.spec.split_dims if index.shape[d] != x.spec.sizes[d]])
    padded = [p if a else index.shape[d] for d, (p, a) in enumerate(zip(x.spec.padded, x.spec.dims, strict=True))]
    mine = brought(index, x.spec.context, x.spec.dims, padded, ())
    result = torch.take_along_dim(leave(x), mine, dim) if along_dim else torch.gather(leave(x), dim, mine)
    return enter(result, with_dims_at(x.spec, list(index.shape), list(range(count))))
