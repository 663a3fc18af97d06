"""Torch's operations on parameters of a grid (`ndtp.runtime.grid_tensor`) do what they do with dense ones.

An operation runs on the DTensors where their rule for it is trusted (`ndtp.runtime.dtensor_rules`); padding is zero
wherever it would count.  All others, and those in which padding would count otherwise, run on the whole, gathered, on
every rank: what one writes goes back into the shards, also through a view that shares no memory with them.

Beside plain tensors an operation goes by three rules:

- one that every rank has whole counts as a plain tensor, and so does what comes of it;
- into a plain tensor that is written (`ema.lerp_(p, 0.1)`) goes the whole of it, gathered;
- element by element, in a loss, and where a parameter is written, a plain tensor is one that every rank has.

A number made of it (`p.pow(2).sum()`) is a plain number, the same on every rank.  What draws (`nn.init`) draws what it
would of the dense tensor, from torch's generator, of which a rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.errors import LayoutError
from ndtp.runtime.dtensor_rules import LISTS, WRITES, dtensor_of, is_loss, is_odd, is_trusted, lacks_rule
from ndtp.runtime.grid_parts import clear, full_of, on_every_rank
from ndtp.runtime.halves import HALVES, laid_sizes
from ndtp.runtime.handed_out import is_moved, note_use
from ndtp.runtime.list_operations import by_groups, groups_of, operands_of_each
from ndtp.runtime.reads import NamedRead
from ndtp.runtime.reads_beside_plain import (
    fits,
    is_plain_beside,
    is_read_beside_wholes,
    is_whole_tensor,
    refused,
    warn_of_gathered,
)
from ndtp.runtime.shard_operations import NARROW, is_joint, is_norm_of_many, joined_norms, norms_on_shards, on_shards
from ndtp.runtime.whole_operations import by_whole, count_writes, drawn, wrote

DETACH, FOREACH_NORM = torch.ops.aten.detach.default, torch.ops.aten._foreach_norm.Scalar
LIKE = ("zeros_like", "ones_like", "full_like")
NEW = ("new_zeros", "new_empty", "new_ones", "new_full", "new_empty_strided")
SAME, MOVED = ("detach", "clone", "_to_copy", "alias", "empty_like"), ("detach", "_to_copy")
# Of one with padding these run on the DTensor, too, as do those that go element by element.
SUMS = ("sum", "linalg_vector_norm", "norm", "_foreach_norm", "count_nonzero")  # to which zeros add nothing
SCALED = ("_foreach_addcmul", "_foreach_addcdiv")
NORMS = ("linalg_vector_norm", "_foreach_norm")
DRAWS = (
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_",
)  # fmt: skip


def operate(kind: object, func: Any, args: Arguments, kwargs: Keywords) -> object:
    """An operation of which some operands are of `kind`."""
    name = func.overloadpacket.__name__
    if func._overloadname == "Tensor" and name.startswith(SCALED):  # whose last operand is one number for each place
        return func.overloadpacket.ScalarList(*args[:-1], args[-1].tolist())
    if name == "equal" and args[0].shape != args[1].shape:  # of which torch's rule makes one layout
        return False
    if (done := _on_shards(kind, func, name, args, kwargs)) is not NotImplemented:
        return done
    if name.startswith(LISTS) and (done := _in_groups(kind, func, name, args, kwargs)) is not NotImplemented:
        count_writes(_written(func, name, args, kwargs))
        return done
    given = args[:2] if func is FOREACH_NORM and args[2:] == (None,) else args
    is_free = name in NORMS and kwargs.get("dtype") is None and (func is not FOREACH_NORM or len(given) < 3)
    if is_free and (dtype := _narrow(args[0])) is not None:
        made = func(*given, **{**kwargs, "dtype": torch.float32})  # or it is squared in 16 bits where ranks add it up
        return tree_map(lambda x: x.to(dtype), made)
    flat, tree = tree_flatten((args, kwargs))
    if name != "stack":
        for x in flat:
            _finish(kind, x)
    mine = [x for x in flat if type(x) is kind]
    if torch.is_grad_enabled():
        for x in mine:
            note_use(x)
    written = _written(func, name, args, kwargs)
    is_padded, is_drawn = any(x.is_padded for x in mine), torch.Tag.nondeterministic_seeded in func.tags
    if is_padded and not name.startswith(LISTS):
        if (torch.Tag.pointwise in func.tags or name == "copy_") and _lie_apart(kind, mine):
            return by_whole(kind, func, name, flat, tree, written, is_drawn)
        stored = [x._dtensor.shape for x in mine]
        flat = [full_of(x) if x is not written and _is_dense(kind, x, stored) else x for x in flat]
    if name == "new_empty" and tuple(args[1]) == tuple(mine[0].shape):  # for a draw, such as `orthogonal_`'s
        return func(mine[0]._local_tensor, *args[1:], **kwargs)
    if torch.Tag.inplace_view in func.tags and name not in ("detach_", "requires_grad_"):
        return _viewed_in_place(kind, func, name, args, kwargs)
    if name in DRAWS and type(args[0]) is kind:
        return drawn(func, args, kwargs)
    if _is_plain(written) or any(is_whole_tensor(x) for x in flat):
        if name.startswith(LISTS) and len(args[0]) > 1:  # each plain tensor lies as the one at its place
            return by_groups(func, args, kwargs, [[i] for i in range(len(args[0]))])
        return _beside_plain(kind, func, name, flat, tree, written)
    is_each = torch.Tag.pointwise in func.tags or name in WRITES or name.startswith(LISTS)
    # With `out` it would take the size of what is written.
    is_wrong = "out" in kwargs or not is_trusted(func, name, args) or (written is not None and not is_each)
    if is_drawn or is_wrong or (is_padded and not _keeps_padding(func, name, args)):
        return by_whole(kind, func, name, flat, tree, written, is_drawn)
    if is_padded and name in NEW and tuple(args[1]) == tuple(mine[0].shape):
        flat, tree = tree_flatten(((args[0], mine[0]._dtensor.shape, *args[2:]), kwargs))
    return _on_dtensors(kind, func, name, flat, tree, written, mine)


def _narrow(of: Any) -> torch.dtype | None:
    """The dtype of a tensor, or of all tensors of a list, that has 16 bits; None of another one."""
    dtypes = {x.dtype for x in (of if isinstance(of, (list, tuple)) else [of])}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {*NARROW} else None


def _in_groups(kind: object, func: TorchFunction, name: str, args: Arguments, kwargs: Keywords) -> object:
    """Return the result of an operation on lists whose places have operands of several kinds, or with other padding;
    `NotImplemented` of another one.
    """
    groups = groups_of(args)
    if len(groups) < 2 and any(_lie_apart(kind, each) for each in operands_of_each(args, kwargs)):
        if len(args[0]) == 1:
            flat, tree = tree_flatten((args, kwargs))
            return by_whole(kind, func, name, flat, tree, args[0] if name.endswith("_") else None)
        groups = [[i] for i in range(len(args[0]))]
    return by_groups(func, args, kwargs, groups) if len(groups) > 1 else NotImplemented


def _on_dtensors(kind: Any, func: Any, name: str, flat: list[Any], tree: Any, written: Any, mine: list[Any]) -> object:
    """Run an operation on DTensors."""
    is_padded = any(x.is_padded for x in mine)
    if is_padded and name in SUMS:
        for x in mine:
            if not isinstance(x, nn.Parameter):  # what was computed, as `p == 0`
                clear(x)
    given, named = tree_unflatten([x._dtensor if type(x) is kind else x for x in flat], tree)
    odd = next((x for x in mine if any(map(is_odd, x.placements))), None)  # norms that are stacked
    try:
        with nullcontext() if odd is None else NamedRead(odd, name, odd.ndtp_name):
            made = func(*given, **named)
    except (NotImplementedError, RuntimeError) as error:
        if not lacks_rule(error):
            raise
        return by_whole(kind, func, name, flat, tree, written)
    if written is not None:
        wrote(kind, written)
        return None if made is None else written
    is_view = any(each.alias_info is not None for each in func._schema.returns)
    places = operands_of_each(*tree_unflatten(flat, tree)) if name.startswith(LISTS) else ()
    likes = [next((x for x in each if type(x) is kind), None) for each in places]
    real = _broadcast(mine) if is_padded and torch.Tag.pointwise in func.tags else None
    return _results(kind, func, name, made, mine[0], (flat, tree) if is_view else None, real, likes)


def _lie_apart(kind: Any, operands: Sequence[Any]) -> bool:
    """Whether operands of an operation element by element do not have the same padding behind each dim."""
    found: dict[int, tuple[int, int]] = {}
    mine = [x for x in operands if type(x) is kind and x.dim()]
    if any(x.dim() != x._dtensor.dim() for x in mine):  # halves in a dim of their own
        return len({(x.shape, x._dtensor.shape) for x in mine}) > 1
    for x in operands:
        if type(x) is kind:
            for dim, sizes in enumerate(zip(reversed(x.shape), reversed(x._dtensor.shape), strict=True)):
                if sizes[1] != 1 and found.setdefault(dim, sizes) != sizes:
                    return True
    return False


def _viewed_in_place(kind: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Change the sizes of what was computed, as torch does of results of its own: `matmul` has a `squeeze_`."""
    own = args[0]
    if isinstance(own, nn.Parameter) or name not in ("squeeze_", "unsqueeze_", "t_", "transpose_"):
        raise LayoutError(
            f"ndtp: {own.ndtp_name or 'a parameter'} {tuple(own.shape)} is split over ranks, and {name}() would change "
            "its sizes or memory in place\n  fix: "
            + (f"{name.rstrip('_')}() gives another tensor" if hasattr(own, name.rstrip("_")) else "p.data = other")
        )
    before = kind(own._dtensor, False, own.ndtp_real)
    vars(before).update(vars(own))
    made = getattr(torch.ops.aten, name[:-1])(before, *args[1:], **kwargs)
    if type(made) is not kind:  # a number
        made = kind(on_every_rank(made, before))
    vars(own).update(vars(made))
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        func(own, *args[1:], **kwargs)  # of the outer tensor, the sizes
    return own


def _on_shards(kind: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation that runs on this rank's shards alone; `NotImplemented` of another one."""
    if func is DETACH and not args[0].requires_grad:  # of each gradient, when autograd takes it
        _finish(kind, args[0])
        own = args[0]._dtensor
        return _taken(kind, dtensor_of(func(own._local_tensor), own._spec), args[0], name)
    if is_norm_of_many(name, 2) and (norms := norms_on_shards(kind, func, args, kwargs)) is not None:
        return _named_norms(kind, norms, args[0])  # summed at once, where they meet
    if name == "stack" and is_norm_of_many(name, 2) and (joined := joined_norms(kind, args[0])) is not None:
        return joined
    if (done := on_shards(kind, func, args, kwargs)) is None:
        return NotImplemented
    written, made, likes = done
    if written is None:
        given = [_taken(kind, x, like, name) for x, like in zip(made, likes, strict=True)]
        return given if name.startswith(LISTS) else given[0]
    wrote(kind, written)
    return None if name.startswith(LISTS) else written


def _named_norms(kind: Any, norms: Any, of: Any) -> object:
    """Return norms, of one tensor or of several, with the names of these."""
    made = [kind(x) for x in (norms if isinstance(norms, list) else [norms])]
    for norm, x in zip(made, of if isinstance(norms, list) else [of], strict=True):
        norm.ndtp_name, norm.ndtp_norm_of = x.ndtp_name, x.dtype
    return made if isinstance(norms, list) else made[0]


def _results(kind: Any, func: Any, name: str, made: Any, of: Any, given: Any, real: Any, likes: Sequence[Any]) -> Any:
    """Return the result of an operation on DTensors, as it is given out.

    Args:
        of: the first of its operands.
        given: all of them, of one that gives views.
        real: its sizes without padding, where they are not those of the first.
        likes: of an operation on lists, for each place the operand as which its result lies.
    """
    if is_norm_of_many(name, 2) and all(_are_joint(x) for x in tree_flatten(made)[0]):
        return tree_map(lambda x: kind(x) if isinstance(x, DTensor) else x, made)  # summed at once, where they meet
    is_source = given is not None and name not in ("detach", "alias")
    leaves, form = tree_flatten(made)
    for i, x in enumerate(leaves):
        if isinstance(x, DTensor):
            of = likes[i] if likes and likes[i] is not None else of
            leaves[i] = _taken(kind, x, of, name, (of, (func, *given, i)) if is_source else None, real)
    return tree_unflatten(leaves, form)


def _are_joint(x: object) -> bool:
    return not isinstance(x, DTensor) or all(is_joint(each) for each in x.placements if is_odd(each))


def _broadcast(operands: Sequence[object]) -> object:
    """The sizes without padding of what operands give element by element."""
    return torch.broadcast_shapes(*(x.shape for x in operands if isinstance(x, Tensor)))


def _finish(kind: object, x: Any) -> None:
    """Let a number of which ranks have parts be one that every rank has: the same object, which may be written to."""
    if type(x) is kind and not x.dim() and any(map(is_odd, x.placements)):
        with NamedRead(x, "number", x.ndtp_name):
            x._dtensor = on_every_rank(x._dtensor.full_tensor(), x)


def _is_dense(kind: object, x: Any, stored: Sequence[object]) -> bool:
    """A DTensor that is no parameter's, and which every rank has whole, or whose sizes are those without padding."""
    is_other = isinstance(x, DTensor) and type(x) is not kind and x.dim() > 0
    return is_other and (x.shape not in stored or all(placement.is_replicate() for placement in x.placements))


def _written(func: Any, name: str, args: Any, kwargs: Keywords) -> Any:
    """Return what an operation writes into, and returns."""
    if "out" in kwargs:
        return kwargs["out"]
    is_in_place = name.endswith("_") and not name.endswith("__")
    return args[0] if is_in_place and func._schema.is_mutable and args else None


def _taken(kind: Any, made: Any, of: Any, name: str, source: Any = None, real: Any = None) -> Any:
    """Return what an operation gave: a number is finished, and plain."""
    # A view of one element, of what wants no gradient, may be written to.
    is_number = source is None or not of.dim() or (torch.is_grad_enabled() and of.requires_grad)
    if made.dim() == 0 and is_number and not (name in MOVED and not of.dim() and is_moved()):
        with NamedRead(made, name, of.ndtp_name):
            return made.full_tensor()
    if any(map(is_odd, made.placements)):
        with NamedRead(made, name, of.ndtp_name):
            made = made.redistribute(placements=[Replicate() if is_odd(p) else p for p in made.placements])
    is_like = made.shape == of._dtensor.shape and source is None
    result = kind(made, False, real or (of.ndtp_real if is_like else None))
    result.ndtp_name = of.ndtp_name
    for key in ("ndtp_is_read", "ndtp_of_model", *(("ndtp_layout",) if name in SAME else ())):
        if hasattr(of, key):
            setattr(result, key, getattr(of, key))
    if source is not None:
        mine, theirs = made._local_tensor, of._local_tensor
        is_shared = mine.untyped_storage()._cdata == theirs.untyped_storage()._cdata
        result.ndtp_view = (source[0], None if is_shared else source[1])
    elif name in ("detach", "alias") and hasattr(of, "ndtp_view"):
        result.ndtp_view = of.ndtp_view
    return result


# ---------------------------------------------------------------------------------------------------------- the whole


def _keeps_padding(func: Any, name: str, args: Arguments) -> bool:
    """Whether an operation on a DTensor with padding gives one that has it at the same place, or counts no zeros."""
    if name in SUMS:
        if "norm" in name and isinstance(args[1] if len(args) > 1 else None, (int, float)) and args[1] < 0:
            return False  # the least of all
        dims = [x for x in args[1:] if isinstance(x, (list, tuple)) or (name == "count_nonzero" and x is not None)]
        return name == "_foreach_norm" or not any(x != [] for x in dims)
    if name in (*SAME, *LIKE, *NEW, "copy_", "zero_", "fill_", "is_same_size"):
        return True
    return (torch.Tag.pointwise in func.tags and name != "equal") or name.startswith(LISTS)


# ------------------------------------------------------------------------------------------------ beside plain tensors


def _beside_plain(kind: object, func: Any, name: str, flat: Sequence[Any], tree: Any, written: object) -> object:
    into = written if isinstance(written, (list, tuple)) else [written]
    is_split = False
    if any(map(_is_plain, into)):
        given = [full_of(x) if isinstance(x, DTensor) else x for x in flat]
    elif all(is_plain_beside(x, flat) for x in flat if isinstance(x, DTensor)) and written is None:
        given = [x._local_tensor if isinstance(x, DTensor) else x for x in flat]
    elif written is None and is_read_beside_wholes(func, flat):
        warn_of_gathered(flat)
        given = [full_of(x) if isinstance(x, DTensor) else x for x in flat]
    else:
        split = next((x for x in flat if isinstance(x, DTensor) and not is_plain_beside(x, flat)), into[0])
        is_each = torch.Tag.pointwise in func.tags or name == "copy_" or "foreach" in name
        is_in_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]  # of what ran on the whole
        if not is_each and (type(written) is kind or is_in_backward or is_loss(func)):
            return by_whole(kind, func, name, flat, tree, written)
        if not is_each:
            raise refused(name, split, flat)
        given = [_beside(x, split, name, flat) if is_whole_tensor(x) else x for x in flat]
        is_split = True
    if is_split:
        given = [getattr(x, "_dtensor", x) for x in given]
    args, kwargs = tree_unflatten(given, tree)
    try:
        made = func(*args, **kwargs)
    except NotImplementedError as error:
        if not is_split or not lacks_rule(error):
            raise
        return by_whole(kind, func, name, flat, tree, written)
    if is_split and written is not None:
        wrote(kind, written)
    count_writes(written)
    if written is not None and made is not None:
        return written
    if not is_split:
        return made
    of = next(x for x in flat if type(x) is kind)
    real = _broadcast(flat) if torch.Tag.pointwise in func.tags else None
    return tree_map(lambda x: _taken(kind, x, of, name, None, real) if isinstance(x, DTensor) else x, made)


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor)


def _beside(x: Tensor, split: Any, name: str, flat: Sequence[Any]) -> Any:
    """A plain tensor as one that every rank has, in the place of the split one's whole."""
    shape = getattr(split, "_dtensor", split).shape
    x = x.to_dense() if x.is_sparse else x  # what SparseAdam adds
    if not fits(x, split.shape):
        raise refused(name, split, flat)
    if shape != split.shape:
        real_sizes, at = laid_sizes(split.shape, len(shape)), x.dim() - split.dim() + 1
        if len(shape) > split.dim() and at >= 0:
            x = x.unflatten(at, (HALVES, -1) if x.shape[at] > 1 else (1, 1))
        grow: list[int] = []
        for have, real, want in zip(reversed(x.shape), reversed(real_sizes), reversed(shape), strict=False):
            grow += [0, want - real if have == real and want != real else 0]
        x = torch.nn.functional.pad(x, grow) if any(grow) else x
    return on_every_rank(x, split)
