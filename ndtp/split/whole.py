"""The whole tensor for functions without a rule, and the parts of a tensor besides its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.compute.torch_calls import TorchFunction
from ndtp.errors import LayoutError
from ndtp.runtime.arrival import local_of
from ndtp.runtime.memories import given_memory
from ndtp.runtime.waiting_calls import note_data_read
from ndtp.split.copies import as_view, share_memory, standing_for
from ndtp.split.gathered_operands import GatheredOperands
from ndtp.split.moving import cut, moved
from ndtp.split.spec import Spec, layout_of
from ndtp.split.tensor import (
    GATHERED,
    NO_RULE,
    SplitTensor,
    enter,
    getters,
    leave,
    name_of,
    rule,
    split_in,
    strides_of,
    writes,
)


@rule(GATHERED)
def whole(x: Any) -> Any:
    """The whole tensor of a split one, on every rank; a collective.  Anything else as it is."""
    if not isinstance(x, SplitTensor):
        return x
    made = leave(moved(x, [()] * len(x.spec.sizes)))
    # As the dense one is: code may ask for a view, or draw random numbers, which fill a tensor in the order of memory.
    made = made.contiguous() if x.strides is None else _in_memory_order(made, x)
    return x.spec.mesh.step.made_whole(made)


@rule(NO_RULE)
def on_whole(func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the function's result on the whole tensors.

    Raises:
        LayoutError: the function hands out memory, which would be that of a copy.
    """
    name = name_of(func)
    found = split_in([*args, *kwargs.values()])
    if func in MEMORY:
        raise LayoutError(
            f"parallelize: code asks for the memory ({name}) of {found[0].spec}, of which this rank has a shard\n"
            "  fix: x.gathered() gives the whole tensor; ndtp.register_rule tells how the code's kernel takes shards"
        )
    into_whole = writes(func) and bool(args) and isinstance(args[0], Tensor) and not isinstance(args[0], SplitTensor)
    for x in found:
        if x.spec.axes:
            x.spec.context.note(name, x.spec, into_whole)
    return GatheredOperands(SplitTensor, whole, _cut_like, leave, _view).run(func, args, kwargs)


def _cut_like(x: SplitTensor, made: Tensor) -> Tensor:
    return cut(made, x.spec)


def _view(result: Tensor, first: Tensor, x: SplitTensor) -> SplitTensor:
    """A view of a gathered tensor as one of the tensor itself."""
    bare = Spec(x.spec.context, tuple(result.shape), layout_of(x.spec.mesh, [()] * result.dim()), tuple(result.shape))
    made = enter(result.view_as(result), bare)
    made.strides = None if result.is_contiguous() else result.stride()
    if share_memory(first, x):
        return as_view(made, x)
    made.link = standing_for(x, first)
    return made


def _in_memory_order(x: Tensor, of: SplitTensor) -> Tensor:
    """A tensor whose dims lie in memory in the order of those of the dense tensor that `of` is split from."""
    strides = strides_of(of) or torch.empty(of.spec.sizes, device="meta").stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    ordered = x.permute(order)
    steps = [step for step, size in zip(ordered.stride(), ordered.shape, strict=True) if size > 1]
    if steps == sorted(steps, reverse=True) and 0 not in steps:
        return x
    return ordered.contiguous().permute([order.index(d) for d in range(x.dim())])


@rule(torch.as_strided, Tensor.as_strided)
def _strided(func: TorchFunction, x: object, *args: Any, **kwargs: Any) -> object:
    """Return a view of memory: of a whole tensor that lies in it as the dense one does.

    Raises:
        LayoutError: the dense one is a part of a larger tensor, whose memory it would look at.
    """
    if not isinstance(x, SplitTensor):
        return NotImplemented
    x.spec.context.note("as_strided", x.spec)
    made = whole(x)
    steps = zip(made.stride(), x.strides or made.stride(), made.shape, strict=True)
    if any(a != b for a, b, size in steps if size > 1):
        raise LayoutError(
            f"parallelize: as_strided of {x.spec}, which is a part of the memory of a larger tensor\n"
            "  fix: x.contiguous() before it, or x.unfold"
        )
    return func(made, *args, **kwargs)


MEMORY = {
    Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__, Tensor.share_memory_,
}  # fmt: skip


@rule(Tensor.__repr__, Tensor.__format__, Tensor.__str__)
def _printed(func: TorchFunction, x: Any, *args: object, **kwargs: object) -> str:
    if func is Tensor.__format__ and not x.spec.sizes:  # a number, which every rank has
        return func(whole(x), *args)  # type: ignore[no-any-return]
    return f"SplitTensor({x.spec}, from '{x.spec.origin}')"


@rule(Tensor.as_subclass)
def _bare(func: TorchFunction, x: SplitTensor, kind: type) -> object:
    return x if kind is SplitTensor else whole(x).as_subclass(kind)


@rule(*getters("data"))
def _numbers(func: TorchFunction, x: SplitTensor) -> object:
    if x.stands_for is not None:
        note_data_read(x.stands_for)
    with torch._C.DisableTorchFunctionSubclass():
        made = enter(leave(x).data, x.spec)
    made.strides = x.strides
    return as_view(made, x)


@rule(Tensor.data.__set__)  # type: ignore[attr-defined]
def _other_memory(func: TorchFunction, x: SplitTensor, value: Any) -> None:
    """Give a split tensor, and the parameter that it stands for, other memory: who has got that of before keeps it."""
    if not isinstance(value, Tensor):
        return func(x, value)  # type: ignore[no-any-return]  # torch refuses it
    own, is_alike = x.stands_for, isinstance(value, SplitTensor) and value.spec == x.spec
    has_its_kind = (value.shape, value.dtype, value.device) == (x.shape, x.dtype, x.device)
    if not has_its_kind or (own is not None and not share_memory(local_of(own), x)):
        return on_whole(func, (x, value), {})  # type: ignore[no-any-return]
    shard = (leave(value) if is_alike else cut(whole(value).detach(), x.spec)).detach()
    x.link = None
    with torch._C.DisableTorchFunctionSubclass():
        if own is None:
            x.data = shard
            return None
        note_data_read(own)
        local = local_of(own)
        other = torch.zeros_like(local)
        other.as_strided(x.shape, x.stride(), x.storage_offset() - local.storage_offset()).copy_(shard)
        given_memory(own, other)
    return None
