"""Products of activations, by letters as in the role rule: a contracted letter that is split leaves a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.grid import Grid
from ndtp.compute.torch_calls import TorchFunction
from ndtp.compute.traces import is_autocast_on
from ndtp.runtime.recheck import looking_at
from ndtp.split.along import sum_of_ranks
from ndtp.split.elementwise import without_padding
from ndtp.split.moving import brought
from ndtp.split.spec import Axes, Spec, layout_of
from ndtp.split.tensor import SplitTensor, dims_given, enter, rule
from ndtp.split.views import without


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
                if contracted and not _sums_pay(letter, sizes, letters, lies, i, grid, chosen):
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
        result = sum_of_ranks(result, spec.layout, spec, grid.nontrivial([axis for axis in grid.names if axis in sums]))
    return enter(result.view_as(result), spec) if spec.axes else result


def _sums_pay(
    letter: str, sizes: dict[str, int], letters: tuple[str, str, str], lies: Any, i: int, grid: Grid,
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
def matmul(func: TorchFunction, a: Any, b: Any, **kwargs: Any) -> Any:
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


FACTORS = ("batch1", "mat1", "batch2", "mat2")


@rule(torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)
def added(
    func: TorchFunction, c: Any, a: Any = None, b: Any = None, *, beta: float = 1, alpha: float = 1, **named: object
) -> Any:  # fmt: skip
    factors = [x for x in (a, b) if x is not None] + [named.pop(key) for key in FACTORS if key in named]
    if named or len(factors) != 2:
        return NotImplemented
    a, b = factors
    product = torch.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    c = _in_autocast(c, product)
    return product + (c if beta == 1 else c * beta)


@rule(F.linear)
def linear(func: TorchFunction, x: Tensor, weight: Tensor, bias: Any = None) -> Any:
    """Multiply by a weight that is whole on every rank."""
    if x.dim() < 1 or weight.dim() != 2:
        return NotImplemented
    lead = LETTERS[: x.dim() - 1]
    y = contract(x, weight, (lead + "k", "nk", lead + "n"), F.linear)
    return y if bias is None else y + _in_autocast(bias, y)


def _in_autocast(c: Any, product: Any) -> Any:
    """Return what is added to a product in the dtype that autocast gave this one; as it is, where that is off."""
    is_cast = isinstance(c, Tensor) and is_autocast_on(product.device.type)
    return c.to(product.dtype) if is_cast and c.dtype != product.dtype else c


@rule(torch.einsum)
def einsum(func: TorchFunction, *operands: Any) -> Any:
    equation, *tensors = operands
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = list(tensors[0])
    if not isinstance(equation, str) or "..." in equation or len(tensors) != 2:
        return NotImplemented if not isinstance(equation, str) else _einsum_of_others(equation, tensors)
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
    text = f"{parts[0]},{parts[1]}->{out}"
    if not any(isinstance(x, SplitTensor) for x in tensors):
        return torch.einsum(text, *tensors)
    return contract(tensors[0], tensors[1], (parts[0], parts[1], out), lambda a, b: torch.einsum(text, a, b))


@rule(torch.tensordot)
def tensordot(
    func: TorchFunction, a: Tensor, b: Tensor, dims: int | Tensor | Sequence[Sequence[int]] = 2, out: None = None
) -> object:
    """Sum over the last dims of one operand and the first ones of the other, or over the dims that are named."""
    if isinstance(dims, Tensor):
        return NotImplemented
    ends = (range(a.dim() - dims, a.dim()), range(dims)) if isinstance(dims, int) else dims
    of_a, of_b = (dims_given(each, x.dim()) for each, x in zip(ends, (a, b), strict=True))
    sizes = ([x.shape[d] for d in each] for each, x in ((of_a, a), (of_b, b)))
    if len(of_a) != len(of_b) or any(m != n for m, n in zip(*sizes, strict=True)) or a.dim() + b.dim() > len(LETTERS):
        return NotImplemented
    mine, theirs = LETTERS[: a.dim()], list(LETTERS[a.dim() : a.dim() + b.dim()])
    for d, e in zip(of_a, of_b, strict=True):
        theirs[e] = mine[d]
    kept = [c for c in mine if c not in theirs] + [c for c in theirs if c not in mine]
    return torch.einsum(f"{mine},{''.join(theirs)}->{''.join(kept)}", a, b)


def _einsum_of_others(equation: str, tensors: Sequence[Tensor]) -> object:
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
