"""Operations on the whole of tensors of a grid, gathered, and what a write leaves to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.runtime.grid_parts import clear, full_of, lying_as, on_every_rank, part_of
from ndtp.runtime.writes import writes


def by_whole(
    kind: Any, func: Any, name: str, flat: Sequence[Any], tree: Any, written: Any, is_drawn: bool = False
) -> object:
    """Run an operation on the whole of each operand, on every rank; what it writes goes back into the shards."""
    whole = {id(x): full_of(x) for x in flat if isinstance(x, DTensor)}
    args, kwargs = tree_unflatten([whole.get(id(x), x) for x in flat], tree)
    made = func(*args, **kwargs)
    if written is not None:
        for x in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(x, DTensor):
                x._local_tensor.copy_(part_of(whole[id(x)], getattr(x, "_dtensor", x)))  # type: ignore[attr-defined]
        wrote(kind, written)
        return None if made is None else written
    of = next(x for x in flat if type(x) is kind)
    is_view = any(each.alias_info is not None for each in func._schema.returns)
    is_in_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]

    def back(x: Any, index: int) -> Any:
        if not isinstance(x, Tensor) or (not is_view and (is_in_backward or not x.dim())):
            return x
        if is_drawn and x.shape == of.shape:
            local = part_of(x, of._dtensor)
            return kind(lying_as(local, of._dtensor), False, of.ndtp_real)
        result = kind(on_every_rank(x, of))
        result.ndtp_name, result.ndtp_is_read = of.ndtp_name, True
        result.ndtp_of_model = of.ndtp_of_model
        if is_view:
            result.ndtp_view = (of, (func, list(flat), tree, index))
        return result

    leaves, form = tree_flatten(made)
    return tree_unflatten([back(x, i) for i, x in enumerate(leaves)], form)


def drawn(func: TorchFunction, args: Arguments, kwargs: Keywords) -> Any:
    """Draw the numbers of the dense tensor in place (`nn.init`), of which this rank keeps its part."""
    own = args[0]
    if own.is_meta:
        return own
    whole = torch.empty(own.ndtp_real, dtype=own.dtype, device=own.device)
    func(whole, *args[1:], **kwargs)
    own._local_tensor.copy_(part_of(whole, own._dtensor))
    wrote(type(own), own)
    return own


def count_writes(written: object) -> None:
    """Count a write to plain tensors in a list, which torch does not where tensors of a grid are in another list."""
    if isinstance(written, (list, tuple)):
        plain = [x for x in written if isinstance(x, Tensor) and not isinstance(x, DTensor) and not x.is_inference()]
        torch.autograd.graph.increment_version(plain)


def wrote(kind: Any, written: Any) -> None:
    """Padding stays zero; and what a view was written to, what it is a view of has, too."""
    if isinstance(written, (list, tuple)):  # whose changes torch counts for tensors of its own alone
        torch.autograd.graph.increment_version([x for x in written if type(x) is kind and not x.is_inference()])
    for x in written if isinstance(written, (list, tuple)) else [written]:
        if type(x) is not kind:
            continue
        writes.note(x)
        if x.is_padded:
            clear(x)
        source, way = getattr(x, "ndtp_view", (None, None))
        if source is None:
            continue
        if way is not None:
            func, flat, tree, index = way
            whole = full_of(source).clone()
            args, kwargs = tree_unflatten([whole if each is source else each for each in flat], tree)
            made = func(*args, **kwargs)
            tree_flatten(made)[0][index].copy_(full_of(x))
            source._local_tensor.copy_(part_of(whole, source._dtensor))
        wrote(kind, source)
