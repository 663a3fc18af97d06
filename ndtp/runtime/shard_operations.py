"""Operations element by element on tensors of a grid that lie alike run on the shards alone.

Each number of the result comes of numbers that this rank has, at the same place of its shards, so that DTensor has no
layout to find and nothing to move: an optimizer's step is made of such operations, of each parameter or of lists.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.runtime.dtensor_rules import dtensor_of, is_odd
from ndtp.runtime.facts import digest
from ndtp.runtime.grid_parts import clear, on_every_rank
from ndtp.runtime.reads import NamedRead

PLAIN = (int, float, complex, str, type(None))  # a bool is an int
MOVED = ("copy_", "zero_", "fill_")  # element by element without torch's tag
_TOTAL = inspect.unwrap(torch.nn.utils.clip_grad._get_total_norm).__code__
NARROW = (torch.float16, torch.bfloat16)
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


@cache
def form_of(func: Any) -> str:
    """Return "each" or "lists" for an operation element by element, on tensors or on lists of them, else ""."""
    name, returns = func.overloadpacket.__name__, func._schema.returns
    if name.startswith("_foreach_"):
        word = name.removeprefix("_foreach_")
        one = getattr(torch.ops.aten, word.removesuffix("_"), None) or getattr(torch.ops.aten, word, None)
        # TorchScript's own of the name take numbers alone.
        forms = [] if one is None else [getattr(one, form) for form in one.overloads()]
        forms = [form for form in forms if any(str(x.type) == "Tensor" for x in form._schema.arguments)]
        # `max` of one operand is a number, of two it goes element by element.
        forms = [form for form in forms if form._overloadname == "default"] or forms
        is_each = any(torch.Tag.pointwise in form.tags for form in forms)
        return "lists" if is_each or word in MOVED else ""
    if name in FUSED:
        return "lists"
    if torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.inplace_view in func.tags:
        return ""
    is_each = torch.Tag.pointwise in func.tags or name in MOVED
    is_one = len(returns) == 1 and str(returns[0].type) == "Tensor"
    is_out = any(argument.is_out for argument in func._schema.arguments)
    return "each" if is_each and is_one and not is_out else ""


def on_shards(kind: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], list[Any]] | None:
    """Run an operation on this rank's shards, where each number of the result comes of numbers at its place in them.

    Returns:
        The operand that the operation wrote to (None where it wrote to none), the results as DTensors, and for each the
        operand that lies alike; or None where the operation is of another kind, or its operands do not lie alike, and
        nothing has run.
    """
    form = form_of(func)
    if form == "each":
        if (like := _alike(kind, args)) is None or not all(map(_is_plain, kwargs.values())):
            return None
        made = func(*[x._dtensor._local_tensor if type(x) is kind else x for x in args], **kwargs)
        return (args[0], [], []) if func._schema.is_mutable else (None, [_lying_as(made, like)], [like])
    return _lists(kind, func, args, kwargs) if form else None


def is_norm_of_many(name: str, depth: int) -> bool:
    """Return whether torch asks for the norms of several gradients, all of which it stacks (`clip_grad_norm_`).

    Args:
        depth: how many calls the caller is below the dispatch of the operation.
    """
    if name not in ("linalg_vector_norm", "stack"):
        return name == "_foreach_norm"
    caller = sys._getframe(depth + 1).f_back  # none in a thread of autograd's own
    frames = (caller, caller and caller.f_back)  # the second of a list's comprehension, before Python 3.12
    return any(frame is not None and frame.f_code is _TOTAL for frame in frames)


def norms_on_shards(kind: Any, func: Any, args: Any, kwargs: object) -> Any:
    """Return the norm of a tensor of a grid, or of each in a list, of this rank's shards, as DTensors of which ranks
    have parts; or None where it is another operation, or a norm of another form, and nothing has run.

    It is what `torch.nn.utils.clip_grad_norm_` takes of each gradient.
    """
    is_list = func is torch.ops.aten._foreach_norm.Scalar
    order = args[1] if len(args) > 1 else 2
    if not is_list and func is not torch.ops.aten.linalg_vector_norm.default:
        return None
    of = args[0] if is_list else args[:1]
    is_known = isinstance(order, (int, float)) and order > 0 and args[2:] in ((), (None,)) and not kwargs
    if not is_known or any(_alike(kind, (x,)) is None for x in of):
        return None
    for x in of:
        if x.is_padded and not isinstance(x, nn.Parameter):  # what was computed, as `grad + 1`
            clear(x)
    local = [x._dtensor._local_tensor for x in of]
    # Norms of 16 bits would be squared in 16 bits where ranks add them up.
    wide = [torch.float32 if x.dtype in NARROW and any(map(Placement.is_shard, x.placements)) else None for x in of]
    if is_list and len({*wide}) == 1:
        made = func(local, order, dtype=wide[0])
    else:
        made = [torch.linalg.vector_norm(x, order, dtype=dtype) for x, dtype in zip(local, wide, strict=True)]
    parts, specs = [], dict[Any, DTensorSpec]()  # most tensors of a list lie alike
    for x, norm in zip(of, made, strict=True):
        spec = x._dtensor._spec
        key = id(spec.mesh), spec.placements, norm.dtype
        lies = specs.get(key) or specs.setdefault(key, _norm_spec(spec.mesh, spec.placements, order, norm.dtype))
        parts.append(DTensor(norm, lies, requires_grad=False))
    return parts if is_list else parts[0]


def _norm_spec(mesh: Any, placements: Any, order: float, dtype: torch.dtype) -> DTensorSpec:
    """Return how the norm of a tensor that lies so lies: ranks that have a part of the tensor have a part of it."""
    part = _NormPartial(order) if order < math.inf else Partial("max")
    parts = tuple([part if placement.is_shard() else placement for placement in placements])
    return DTensorSpec(mesh, parts, tensor_meta=TensorMeta(torch.Size(()), (), dtype))


def is_joint(placement: Any) -> bool:
    """Return whether ranks have parts of a norm, which are joined as norms are."""
    return isinstance(placement, _NormPartial) or (placement.is_partial() and placement.reduce_op == "max")


def joined_norms(kind: Any, norms: Sequence[Any]) -> object:
    """Return the norm of the norms of several tensors, [1], as one that every rank has; None of other norms.

    Torch asks for the norm of all norms, and for none of them.  A number travels instead of one for each tensor, so
    that ranks which clip the gradients of other tensors do not meet in collectives of other sizes.
    """
    specs = [x._dtensor._spec for x in norms if type(x) is kind]
    odd = {p for spec in specs for p in spec.placements if not p.is_replicate()}
    if len(odd) != 1 or any(x.dim() or type(x) not in (kind, Tensor) for x in norms):
        return None
    mesh, joint = specs[0].mesh, odd.pop()
    if not is_joint(joint) or any(spec.mesh != mesh for spec in specs):
        return None
    whole = (Replicate(),) * mesh.ndim
    alike: dict[Any, list[Tensor]] = {}
    for x in norms:
        alike.setdefault(x._dtensor._spec.placements if type(x) is kind else whole, []).append(_local(kind, x))
    placements = tuple([joint if any(of[i] == joint for of in alike) else Replicate() for i in range(mesh.ndim)])
    order, parts = getattr(joint, "norm_type", math.inf), []
    for of, local in alike.items():
        # As many ranks have each of these whole, and all of theirs are added up.
        times = math.prod(mesh.size(i) for i, p in enumerate(placements) if p != of[i])
        parts.append(torch.linalg.vector_norm(torch.stack(local), order) * times ** (-1 / order))
    made = torch.linalg.vector_norm(torch.stack(parts), order, keepdim=True)
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(made.shape, made.stride(), made.dtype))
    result = DTensor(made, spec, requires_grad=False)
    names = sorted(getattr(x, "ndtp_name", "") for x in norms)
    named = names[0] if len(names) == 1 else f"{len(names)} tensors (names {digest(names):x})"
    dtypes = [getattr(x, "ndtp_norm_of", x.dtype) for x in norms]
    with NamedRead(result, "norm", named):
        whole = result.full_tensor().to(reduce(torch.promote_types, dtypes))
    return kind(on_every_rank(whole, result))


def _lists(
    kind: object, func: Any, args: Arguments, kwargs: Keywords
) -> tuple[object, list[object], list[object]] | None:
    if not isinstance(args[0], (list, tuple)):
        return None
    count, is_fused = len(args[0]), func.overloadpacket.__name__ in FUSED
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and len(x) == count]
    likes = [_alike(kind, each, is_fused) for each in zip(*lists, strict=True)]
    if not all(map(_is_plain, _others(args, kwargs, count))) or any(like is None for like in likes):
        return None
    local = lambda x: [_local(kind, y) for y in x] if isinstance(x, (list, tuple)) else x  # noqa: E731
    made = func(*map(local, args), **{name: local(x) for name, x in kwargs.items()})
    if made is None:
        return args[0], [], []
    return None, [_lying_as(x, like) for x, like in zip(made, likes, strict=True)], likes


def _lying_as(made: Tensor, like: Any) -> DTensor:
    """A result as a DTensor that lies as an operand; of a view with gaps, whose result has none, with other strides."""
    own = like._dtensor
    if made.stride() == own._local_tensor.stride():
        return dtensor_of(made, own._spec)
    strides = torch.empty(own.shape, device="meta").stride()
    return DTensor.from_local(made, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=strides)


def _others(args: Arguments, kwargs: Keywords, count: int) -> Iterator[Any]:
    """All operands of an operation on lists that are no lists of this length, those within other lists too."""
    for x in (*args, *kwargs.values()):
        if not isinstance(x, (list, tuple)):
            yield x
        elif len(x) != count:
            yield from x


def _local(kind: Any, x: Any) -> Any:
    return x._dtensor._local_tensor if type(x) is kind else x


def _is_plain(x: object) -> bool:
    """Whether an operand is the same on all ranks: a number, as one or as a tensor of none of the grid's kinds."""
    return isinstance(x, PLAIN) or (type(x) is Tensor and not x.dim())


def _alike(kind: Any, operands: Sequence[Any], is_fused: bool = False) -> object:
    """Return the first of operands on the grid, beside plain numbers, if all of them lie alike, else None.

    Args:
        is_fused: the operation reads the memory of all operands alike.
    """
    first: Any = None
    for x in operands:
        if type(x) is not kind:
            if not _is_plain(x):
                return None
        elif torch.is_grad_enabled() and x.requires_grad:
            return None  # the graph of autograd is to know of it
        elif first is None:
            if not x.dim() or any(map(is_odd, x._dtensor._spec.placements)):
                return None
            first = x
        elif not _lie_alike(first, x, is_fused):
            return None
    return first


def _lie_alike(one: Any, other: Any, is_fused: bool) -> bool:
    mine, theirs = one._dtensor, other._dtensor
    if one.ndtp_real != other.ndtp_real:
        return False
    if is_fused and mine._local_tensor.stride() != theirs._local_tensor.stride():
        return False
    a, b = mine._spec, theirs._spec
    return a is b or bool(a.shape == b.shape and a.placements == b.placements and a.mesh == b.mesh)
