"""Products of activations, by letters as in the role rule: a contracted letter that is split leaves a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.ops.reductions import sum_over
from ndtp.runtime.recheck import looking_at
from ndtp.split.along import without_padding
from ndtp.split.moving import brought
from ndtp.split.repeated import once
from ndtp.split.spec import Axes, Spec, layout_of
from ndtp.split.tensor import SplitTensor, enter, rule
from ndtp.split.views import without
from ndtp.split.whole import whole


def contract(a: Tensor, b: Tensor, letters: tuple[str, str, str], local: Any) -> Any:
    """`out = sum over letters that out lacks of a * b`, each operand split or whole.

    Args:
        letters: of the dims of a, b and the result; a letter whose size is 1 in an operand and not in the other, as
            batch dims that are broadcast have, is an upper-case one of its own.
        local: computes it of two shards.
    """
    of_a, of_b, of_out = letters
    first = next(x for x in (a, b) if isinstance(x, SplitTensor))
    context = first.spec.context
    grid = context.mesh.grid
    sizes = {**dict(zip(of_b, b.shape, strict=True)), **dict(zip(of_a, a.shape, strict=True))}
    lies: list[dict[str, tuple[Axes, int]]] = []
    operands = []
    for x, own in ((a, of_a), (b, of_b)):
        if isinstance(x, SplitTensor) and x.spec.sections:
            x = without(x, [len(own) - 1])
        operands.append(x)
        spec = x.spec if isinstance(x, SplitTensor) else None
        lies.append({} if spec is None else {
            letter: (axes, padded) for letter, axes, padded in zip(own, spec.dims, spec.padded, strict=True) if axes
        })  # fmt: skip
    a, b = operands
    # Where each letter is split: by the larger operand, then by the other one where its axes are free.
    order = [0, 1] if a.numel() >= b.numel() else [1, 0]
    chosen: dict[str, tuple[Axes, int]] = {}
    for contracted in (False, True):
        for i in order:
            for letter, (axes, width) in lies[i].items():
                if (letter not in of_out) != contracted or letter in chosen:
                    continue
                if set(axes) & {axis for names, _ in chosen.values() for axis in names}:
                    continue
                if contracted and not _sums_pay(letter, axes, sizes, letters, lies, i, grid, chosen):
                    continue
                chosen[letter] = (axes, width)
    every = tuple(axis for names, _ in chosen.values() for axis in names)

    def bring(x: Tensor, own: str) -> Tensor:
        dims = [chosen[c][0] if c in chosen else () for c in own]
        padded = [chosen[c][1] if c in chosen else sizes[c] for c in own]
        shard = brought(x, context, dims, padded, every)
        spec = Spec(context, tuple(sizes[c] for c in own), layout_of(context.mesh, dims), tuple(padded))
        return without_padding(shard, spec, [d for d, c in enumerate(own) if c not in of_out])

    one, other = bring(a, of_a), bring(b, of_b)
    with looking_at(context.mesh.step.recheck, first.spec.origin or "a product of activations"):
        result = local(one, other)
    dims = [chosen[c][0] if c in chosen else () for c in of_out]
    padded = [chosen[c][1] if c in chosen else sizes[c] for c in of_out]
    spec = Spec(
        context, tuple(sizes[c] for c in of_out), layout_of(context.mesh, dims), tuple(padded), (), first.spec.origin
    )
    sums = tuple(axis for c, (names, _) in chosen.items() if c not in of_out for axis in names)
    if sums:
        result = summed(result, spec, grid.nontrivial([axis for axis in grid.names if axis in sums]))
    return enter(result.view_as(result), spec) if spec.axes else result


def summed(shard: Tensor, spec: Spec, axes: Axes) -> Tensor:
    if shard.dim():
        return sum_over(shard.contiguous(), spec.layout, axes, spec.mesh, f"{spec.origin} sum")
    return sum_over(shard.view(1), layout_of(spec.mesh, [()]), axes, spec.mesh, f"{spec.origin} sum").view(())


def _sums_pay(
    letter: str, axes: Axes, sizes: dict[str, int], letters: tuple[str, str, str], lies: Any, i: int, grid: Any,
    chosen: dict[str, Any],
) -> bool:  # fmt: skip
    """Return whether summing parts of the result moves less than gathering the operand; operands split alike are
    summed.
    """
    if letter in lies[1 - i]:
        return lies[1 - i][letter] == lies[i][letter]
    count = lambda own: math.prod(sizes[c] // (grid.size(chosen[c][0]) if c in chosen else 1) for c in own)  # noqa: E731
    return 2 * count(letters[2]) <= count(letters[i])


LETTERS = "abcdefghijlopqrstuvwxyz"


def _batched(a: Tensor, b: Tensor, tail_a: str, tail_b: str, tail_out: str) -> tuple[str, str, str] | None:
    """Letters of operands with broadcast batch dims in front of their last ones."""
    lead_a, lead_b = a.shape[: a.dim() - len(tail_a)], b.shape[: b.dim() - len(tail_b)]
    count = max(len(lead_a), len(lead_b))
    if count > len(LETTERS):
        return None
    out = LETTERS[:count]
    mine, theirs = list(out[count - len(lead_a) :]), list(out[count - len(lead_b) :])
    for k in range(1, min(len(lead_a), len(lead_b)) + 1):
        if lead_a[-k] != lead_b[-k]:
            if lead_a[-k] == 1:
                mine[-k] = mine[-k].upper()
            elif lead_b[-k] == 1:
                theirs[-k] = theirs[-k].upper()
            else:
                return None
    return "".join(mine) + tail_a, "".join(theirs) + tail_b, out + tail_out


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm, torch.mv, Tensor.mv,
      Tensor.__rmatmul__, torch.dot, Tensor.dot)  # fmt: skip
def matmul(func: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return NotImplemented
    if func is Tensor.__rmatmul__:
        a, b = b, a
    if not a.dim() or not b.dim():
        return NotImplemented
    tail_a, tail_b = "mk"[-min(a.dim(), 2) :] if a.dim() > 1 else "k", "kn" if b.dim() > 1 else "k"
    out = ("m" if a.dim() > 1 else "") + ("n" if b.dim() > 1 else "")
    letters = _batched(a, b, tail_a, tail_b, out)
    if letters is None or a.shape[-1] != b.shape[-2 if b.dim() > 1 else -1]:
        return NotImplemented
    return contract(a, b, letters, torch.matmul)


@rule(torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)
def added(func: Any, c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = torch.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (c if beta == 1 else c * beta)


@rule(F.linear)
def linear(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Multiply by a weight that is whole on every rank."""
    if x.dim() < 1 or weight.dim() != 2:
        return NotImplemented
    lead = LETTERS[: x.dim() - 1]
    y = contract(x, weight, (lead + "k", "nk", lead + "n"), F.linear)
    return y if bias is None else y + bias


@rule(torch.einsum)
def einsum(func: Any, *operands: Any) -> Any:
    equation, *tensors = operands
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = list(tensors[0])
    if not isinstance(equation, str) or "..." in equation or len(tensors) != 2:
        return NotImplemented if not isinstance(equation, str) else _einsum_of_others(func, equation, tensors)
    given, arrow, out = equation.replace(" ", "").partition("->")
    parts = given.split(",")
    if not arrow:
        flat = given.replace(",", "")
        out = "".join(sorted(c for c in set(flat) if flat.count(c) == 1))
    if any(len(set(part)) != len(part) or len(part) != x.dim() for part, x in zip(parts, tensors, strict=True)):
        return NotImplemented
    sizes: dict[str, int] = {}
    for part, x in zip(parts, tensors, strict=True):
        for letter, size in zip(part, x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return NotImplemented
    alone = [set(parts[i]) - set(parts[1 - i]) - set(out) for i in (0, 1)]
    if any(alone):  # summed in one operand alone
        tensors = [
            x.sum([d for d, c in enumerate(part) if c in gone]) if gone else x
            for x, part, gone in zip(tensors, parts, alone, strict=True)
        ]
        parts = ["".join(c for c in part if c not in gone) for part, gone in zip(parts, alone, strict=True)]
    if not any(isinstance(x, SplitTensor) for x in tensors):
        return torch.einsum(f"{parts[0]},{parts[1]}->{out}", *tensors)
    text = f"{parts[0]},{parts[1]}->{out}"
    return contract(tensors[0], tensors[1], (parts[0], parts[1], out), lambda a, b: torch.einsum(text, a, b))


def _einsum_of_others(func: Any, equation: str, tensors: Sequence[Tensor]) -> Any:
    """Compute an einsum with its ellipsis replaced by letters, of one operand, or of many by pairs."""
    given, arrow, out = equation.replace(" ", "").partition("->")
    parts = given.split(",")
    if len(parts) != len(tensors):
        return NotImplemented
    if "..." in given:
        free = [c for c in LETTERS + LETTERS.upper() if c not in equation]
        count = max(x.dim() - len(p.replace("...", "")) for p, x in zip(parts, tensors, strict=True) if "..." in p)
        names = "".join(free[:count])
        leads = [x.dim() - len(p.replace("...", "")) for p, x in zip(parts, tensors, strict=True)]
        if any("..." in p and n != count for p, n in zip(parts, leads, strict=True)):
            return NotImplemented
        if not arrow:
            return NotImplemented
        equation = ",".join(p.replace("...", names) for p in parts) + "->" + out.replace("...", names)
        return torch.einsum(equation, *tensors)
    if len(tensors) == 1 and arrow and len(set(parts[0])) == len(parts[0]):
        (x,), (part,) = tensors, parts
        gone = [d for d, c in enumerate(part) if c not in out]
        x = x.sum(gone) if gone else x
        rest = [c for c in part if c in out]
        return x.permute([rest.index(c) for c in out]) if rest else x
    if len(tensors) > 2 and arrow:
        first, second, *others = parts
        later = set("".join(others)) | set(out)
        keep = "".join(dict.fromkeys(c for c in first + second if c in later))
        pair = torch.einsum(f"{first},{second}->{keep}", tensors[0], tensors[1])
        return torch.einsum(",".join([keep, *others]) + "->" + out, pair, *tensors[2:])
    return NotImplemented


@rule(F.scaled_dot_product_attention)
def attention(
    func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Batch dims and heads may be split, and the places of queries, each of which looks at all keys and values."""
    if query.dim() < 3 or not (query.dim() == key.dim() == value.dim()):
        return NotImplemented
    if dropout_p > 0.0:
        return _composed(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    count = query.dim()
    (few, times), (few_values, times_of_values) = once(key, -3), once(value, -3)
    if times == times_of_values > 1 and not enable_gqa:
        key, value, enable_gqa = few, few_values, True
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        made = _grouped(query, key, value)
        if made is None:
            times = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(times, -3) for x in (key, value))
            enable_gqa = False
        else:
            query, key, value = made
    along = query.spec.dims[-2] if isinstance(query, SplitTensor) else ()
    query, key, value = (without(x, [count - 1]) if isinstance(x, SplitTensor) else x for x in (query, key, value))
    if along and is_causal:
        attn_mask, is_causal = _below(query), False
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

    def wide(sizes: Sequence[int]) -> list[int]:
        """Leading sizes with padding; of a tensor with fewer heads its own."""
        count = [spec.mesh.grid.size(axes) for axes in lead]
        return [
            size if not axes else spec.padded[d] if size == spec.sizes[d] else -(-size // n) * n
            for d, (size, axes, n) in enumerate(zip(sizes, lead, count, strict=False))
        ]

    def bring(x: Tensor) -> Tensor:
        return brought(x, spec.context, [*lead, (), ()], [*wide(x.shape[:-2]), *x.shape[-2:]], used)

    mask = attn_mask
    if isinstance(mask, Tensor):
        offset = count - mask.dim()
        dims = [
            lead[offset + d] if d < mask.dim() - 2 and mask.shape[d] == spec.sizes[offset + d] else ()
            for d in range(mask.dim())
        ]
        wide_mask = [spec.padded[offset + d] if axes else mask.shape[d] for d, axes in enumerate(dims)]
        if along and mask.dim() > 1 and mask.shape[-2] == query.shape[-2]:
            dims[-2], wide_mask[-2] = along, query.spec.padded[-2]
        whole_mask = tuple(mask.shape)
        mask = brought(mask, spec.context, dims, wide_mask, used)
        mask = _open(mask, Spec(spec.context, whole_mask, layout_of(spec.mesh, dims), tuple(wide_mask)))
    last = query.spec.padded[-2] if along else query.shape[-2]
    q = brought(query, spec.context, [*lead, along, ()], [*wide(query.shape[:-2]), last, query.shape[-1]], used)
    result = func(q, bring(key), bring(value), mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    batch = (*torch.broadcast_shapes(*[x.shape[:-3] for x in (query, key, value)]), query.shape[-3])
    if not enable_gqa:
        batch = torch.broadcast_shapes(*[x.shape[:-2] for x in (query, key, value)])
    sizes = (*batch, query.shape[-2], value.shape[-1])
    padded = [*wide(batch), last, sizes[-1]]
    made = Spec(spec.context, tuple(sizes), layout_of(spec.mesh, [*lead, along, ()]), tuple(padded), (), spec.origin)
    return enter(result, made)


def _below(query: Any) -> Tensor:
    """Return the causal mask of all queries, [1, .., queries, queries], as torch aligns it."""
    count = query.shape[-2]
    return torch.ones(count, count, dtype=torch.bool, device=query.device).tril()


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


def _grouped(query: Any, key: Any, value: Any) -> Any:
    """Queries, keys and values whose heads are split alike, where each rank's query heads use its own key heads."""
    heads = query.dim() - 3
    specs = [x.spec.dims[heads] if isinstance(x, SplitTensor) else () for x in (query, key, value)]
    axes = specs[0] or specs[1] or specs[2]
    if not axes:
        return query, key, value
    mesh = next(x for x in (query, key, value) if isinstance(x, SplitTensor)).spec.mesh
    if key.shape[-3] % mesh.grid.size(axes):
        return None
    return query, key, value


def _composed(q: Any, k: Any, v: Any, mask: Any, p: float, is_causal: bool, scale: float | None, gqa: bool) -> Any:
    """Attention with dropout, whose mask is one for the whole, by its parts."""
    if gqa and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        rows, columns = q.shape[-2], k.shape[-2]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(F.dropout(torch.softmax(scores, -1), p, True), v)
