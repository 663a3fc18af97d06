"""`scaled_dot_product_attention` of split tensors: heads, sequences and the places of queries may be split.

Where sequences are split, queries meet keys in one of three ways, see `ndtp.algebra.attention_ways`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.attention_ways import AttentionWays
from ndtp.algebra.ring_plan import RingPlan
from ndtp.compute.partial_attention import causal_attention
from ndtp.compute.torch_calls import TorchFunction
from ndtp.compute.traces import is_autocast_on
from ndtp.errors import LayoutError, warn
from ndtp.ops.ring_attention import ring_attention
from ndtp.split.moving import brought, moved
from ndtp.split.repeated import once
from ndtp.split.spec import Axes, Spec, layout_of
from ndtp.split.tensor import SplitTensor, enter, leave, rule
from ndtp.split.views import without
from ndtp.split.whole import whole

KIND = "activations"  # of queries, keys, values and results, for the wire


@rule(F.scaled_dot_product_attention)
def attention(
    func: TorchFunction, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Batch dims and heads may be split, and the places of queries, each of which looks at all keys and values."""
    if query.dim() < 3 or not (query.dim() == key.dim() == value.dim()):
        return NotImplemented
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    alike = 3 if enable_gqa else 2  # from the end: dims that are not broadcast
    lead = torch.broadcast_shapes(*(x.shape[:-alike] for x in (query, key, value)))
    query, key, value = (
        x if x.shape[:-alike] == lead else x.expand(*lead, *x.shape[-alike:]) for x in (query, key, value)
    )
    if dropout_p > 0.0:
        return _composed(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    count = query.dim()
    query, key, value, enable_gqa = _heads_alike(query, key, value, enable_gqa)
    along = query.spec.dims[-2] if isinstance(query, SplitTensor) else ()
    query, key, value = (without(x, [count - 1]) if isinstance(x, SplitTensor) else x for x in (query, key, value))
    if along:
        way = _way(query, key, value, attn_mask, is_causal)
        if way == "ring":
            return _over_ring(query, key, value, attn_mask, is_causal, scale)
        if way == "heads":
            return _over_heads(query, key, value, attn_mask, is_causal, scale)
    starts = along and is_causal and query.shape[-2] == key.shape[-2]
    if along and is_causal and not starts:
        attn_mask, is_causal = _below(query, key), False
    first = max(
        (x for x in (query, key, value) if isinstance(x, SplitTensor)), key=lambda x: len(x.spec.axes), default=None
    )
    if first is None or not first.spec.axes:
        return func(
            whole(query), whole(key), whole(value), whole(attn_mask), 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    spec = first.spec
    lead = [axes if all(x.shape[d] == size or (enable_gqa and d == count - 3) for x in (query, key, value)) else ()
            for d, (axes, size) in enumerate(zip(spec.dims[:-2], spec.sizes[:-2], strict=True))]  # fmt: skip
    lead = [() if set(axes) & set(along) else axes for axes in lead]
    used = (*(axis for axes in lead for axis in axes), *along)
    wide = partial(_with_padding, spec, lead)

    def bring(x: Tensor) -> Tensor:
        sizes = [*wide(x.shape[:-2]), *x.shape[-2:]]
        return brought(x, spec.context, [*lead, (), ()], sizes, used, kind=KIND)

    mask = _brought_mask(attn_mask, query, spec, lead, along, used) if isinstance(attn_mask, Tensor) else attn_mask
    last = query.spec.padded[-2] if along else query.shape[-2]
    q = brought(query, spec.context, [*lead, along, ()], [*wide(query.shape[:-2]), last, query.shape[-1]], used)
    if starts:
        begin = query.spec.here(count - 2).start
        result = causal_attention(q, bring(key), bring(value), begin, scale)
    else:
        result = func(q, bring(key), bring(value), mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    few = 3 if enable_gqa else 2  # the heads are those of queries
    batch = (*torch.broadcast_shapes(*(x.shape[:-few] for x in (query, key, value))), *query.shape[-few:-2])
    sizes = (*batch, query.shape[-2], value.shape[-1])
    padded = [*wide(batch), last, sizes[-1]]
    made = Spec(spec.context, tuple(sizes), layout_of(spec.mesh, [*lead, along, ()]), tuple(padded), (), spec.origin)
    return enter(result, made)


def _autocast(query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """Return the operands in the dtype of autocast, where it is on."""
    device = query.device.type
    if is_autocast_on(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x if x.dtype == dtype else x.to(dtype) for x in (query, key, value))
        if isinstance(mask, Tensor) and mask.is_floating_point():
            mask = mask.to(dtype)
    return query, key, value, mask


def _heads_alike(query: Tensor, key: Any, value: Any, enable_gqa: bool) -> tuple[Any, Any, Any, bool]:
    """Return operands whose heads lie alike, and whether keys and values have fewer heads than queries."""
    (few, times), (few_values, times_of_values) = once(key, -3), once(value, -3)
    if times == times_of_values > 1 and not enable_gqa:
        key, value, enable_gqa = few, few_values, True
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        split = [x.spec for x in (query, key, value) if isinstance(x, SplitTensor) and x.spec.dims[-3]]
        if split and key.shape[-3] % split[0].mesh.grid.size(split[0].dims[-3]):
            times = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(times, -3) for x in (key, value))
            enable_gqa = False
    return query, key, value, enable_gqa


def _with_padding(spec: Spec, lead: Sequence[Axes], sizes: Sequence[int]) -> list[int]:
    """Leading sizes with padding; of a tensor with fewer heads its own."""
    count = [spec.mesh.grid.size(axes) for axes in lead]
    return [
        size if not axes else spec.padded[d] if size == spec.sizes[d] else -(-size // n) * n
        for d, (size, axes, n) in enumerate(zip(sizes, lead, count, strict=False))
    ]


def _brought_mask(mask: Tensor, query: Any, spec: Spec, lead: Sequence[Axes], along: Axes, used: Axes) -> Tensor:
    """Return a mask split as the batch dims, the heads and the queries are that it has."""
    offset = len(spec.sizes) - mask.dim()
    dims: list[Axes] = [
        lead[offset + d] if d < mask.dim() - 2 and mask.shape[d] == spec.sizes[offset + d] else ()
        for d in range(mask.dim())
    ]
    wide_mask = [spec.padded[offset + d] if axes else mask.shape[d] for d, axes in enumerate(dims)]
    if along and mask.dim() > 1 and mask.shape[-2] == query.shape[-2]:
        dims[-2], wide_mask[-2] = along, query.spec.padded[-2]
    whole_mask = tuple(mask.shape)
    mask = brought(mask, spec.context, dims, wide_mask, used)
    return _open(mask, Spec(spec.context, whole_mask, layout_of(spec.mesh, dims), tuple(wide_mask)))


def _below(query: Tensor, key: Any) -> Tensor:
    """Return the causal mask of all queries and keys, as torch aligns it."""
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def _way(query: SplitTensor, key: Any, value: Any, mask: Any, is_causal: bool) -> str:
    """Return the way in which queries that are split along the sequence meet keys.

    Raises:
        LayoutError: heads were asked for, and the ranks do not divide them.
    """
    spec, asked = query.spec, query.spec.context.attention
    if not all(_lies_as(x, spec) for x in (key, value)) or key.shape[-2] != query.shape[-2] or asked == "gather":
        return "gather"
    others = spec.mesh.grid.size(spec.dims[-3])
    local = lambda x: math.prod(x.spec.local)  # noqa: E731
    ways = AttentionWays(
        spec.layout.num_splits(len(spec.sizes) - 2), query.shape[-3] // others, max(key.shape[-3] // others, 1),
        local(query), local(key) + local(value),
    )  # fmt: skip
    is_whole = key.shape[-3] % others == 0 and (ways.repeats == 1 or others == 1)
    is_open = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool and not is_causal)
    way = ways.best() if asked == "auto" else asked
    if way == "heads" and not (ways.repeats and is_whole):
        if asked == "heads":
            raise LayoutError(
                f"attention='heads': {query.shape[-3]} heads and {key.shape[-3]} heads of keys are not divided by "
                f"{ways.ranks} ranks along the sequence and {others} along heads\n  fix: attention='ring' or 'gather'"
            )
        way = "gather"
    if way == "ring" and not is_open:
        if asked == "ring" and "ring" not in spec.context.gathered:
            warn(
                "ndtp: attention='ring' takes masks of booleans; keys and values are gathered for one that is added to "
                "scores"
            )
            spec.context.gathered["ring"] = 0
        way = "gather"
    return way


def _lies_as(x: object, spec: Spec) -> bool:
    """Return whether a rank's keys or values are those of its own queries: split and padded alike, with as many heads
    or a part of them.
    """
    if not isinstance(x, SplitTensor) or x.spec.dims != spec.dims:
        return False
    own, heads, count = x.spec, len(spec.sizes) - 3, len(spec.sizes) - 1
    times = spec.sizes[heads] // own.sizes[heads]
    wanted = [n // times if d == heads else n for d, n in enumerate(spec.padded[:count])]
    return list(own.padded[:count]) == wanted


def _over_ring(q: SplitTensor, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    """Compute attention by parts of keys and values that are passed on."""
    spec, dim = q.spec, len(q.spec.sizes) - 2
    part = spec.padded[dim] // spec.layout.num_splits(dim)
    plan = RingPlan(spec.mesh.grid, spec.dims[dim], spec.sizes[dim], part, is_causal)
    if mask is not None:
        mask = _brought_mask(mask, q, spec, spec.dims[:-2], spec.dims[-2], ())
    result = ring_attention(leave(q), leave(k), leave(v), plan, spec.mesh, scale, mask)
    sizes = lambda own, last: (*own[:-1], last)  # noqa: E731
    made = Spec(
        spec.context, sizes(spec.sizes, v.shape[-1]), spec.layout, sizes(spec.padded, v.shape[-1]), (), spec.origin
    )
    return enter(result.view_as(result), made)


def _over_heads(q: SplitTensor, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    """Compute attention of whole sequences of some heads: an all-to-all brings them together, and one back."""
    spec, dim = q.spec, len(q.spec.sizes) - 2
    along, heads = spec.dims[dim], spec.dims[dim - 1]
    if (times := _sent_heads(k.shape[-3], spec, along) // k.shape[-3]) > 1:
        k, v = (x.repeat_interleave(times, -3) for x in (k, v))
    here: list[Axes] = list(spec.dims)
    here[dim - 1], here[dim] = (*heads, *reversed(along)), ()
    shared = q.shape[-3] != k.shape[-3]
    made = attention(
        F.scaled_dot_product_attention,
        *(moved(x, here, kind=KIND) for x in (q, k, v)),
        mask,
        0.0,
        is_causal,
        scale,
        shared,
    )
    back = [n if axes else size for n, axes, size in zip(spec.padded, spec.dims, made.shape, strict=True)]
    return moved(made, spec.dims, back, kind=KIND)


def _sent_heads(kv_heads: int, spec: Spec, along: Axes) -> int:
    """Return the key heads that an all-to-all sends, where fewer would not divide."""
    return math.lcm(kv_heads, spec.mesh.grid.size((*spec.dims[-3], *along)))


def _open(mask: Tensor, spec: Spec) -> Tensor:
    """Let the rows of a mask that are padding see everything: a row that sees nothing has no softmax."""
    if mask.dtype != torch.bool:
        return mask
    for d in spec.split_dims:
        here = spec.here(d)
        if here.stop > spec.sizes[d]:
            start = max(0, spec.sizes[d] - here.start)
            mask = mask.clone()
            mask.narrow(d, start, len(here) - start).fill_(True)
    return mask


def _composed(q: Any, k: Any, v: Any, mask: Any, p: float, is_causal: bool, scale: float | None, gqa: bool) -> Tensor:
    """Attention with dropout, whose mask is one for the whole, by its parts."""
    if gqa and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        rows, columns = q.shape[-2], k.shape[-2]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is None:
        return torch.matmul(F.dropout(torch.softmax(scores, -1), p, True), v)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    # A row that sees no key gives zeros, as torch's kernels do.
    seen = mask if mask.dtype == torch.bool else mask > float("-inf")
    is_blind = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(is_blind, 0.0), -1).masked_fill(is_blind, 0.0)
    return torch.matmul(F.dropout(weights, p, True), v)
