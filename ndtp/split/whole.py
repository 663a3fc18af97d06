"""The whole tensor for functions without a rule, and the parts of a tensor besides its numbers: hooks and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.errors import LayoutError
from ndtp.split.copies import as_view, share_memory, standing_for, written
from ndtp.split.moving import cut, moved
from ndtp.split.spec import Spec, layout_of
from ndtp.split.tensor import (
    GATHERED,
    NO_RULE,
    SplitTensor,
    enter,
    getters,
    leave,
    mapped,
    name_of,
    rule,
    split_in,
    writes,
)


@rule(GATHERED)
def whole(x: Any) -> Any:
    """The whole tensor of a split one, on every rank; a collective.  Anything else as it is."""
    if not isinstance(x, SplitTensor):
        return x
    made = leave(moved(x, [()] * len(x.spec.sizes)))
    made = made.contiguous() if x.strides is None else made  # as the dense one is: code may ask for a view
    return x.spec.mesh.step.made_whole(made)


@rule(NO_RULE)
def on_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
    for x in found:
        if x.spec.axes:
            x.spec.context.note(name, x.spec)
    into = args[0] if args and isinstance(args[0], SplitTensor) and writes(func) else None
    given = mapped(list(args), whole)
    result = func(*given, **mapped(dict(kwargs), whole))
    if into is None:
        if not args or not isinstance(args[0], SplitTensor):
            return result
        return args[0] if result is given[0] else _marked(result, given, args[0])
    if tuple(given[0].shape) != into.spec.sizes:
        raise LayoutError(
            f"parallelize: {name} gives {into.spec} other sizes, {tuple(given[0].shape)}, in place\n"
            f"  fix: the function that returns a new tensor"
        )
    with torch._C.DisableTorchFunctionSubclass():
        into.copy_(cut(given[0], into.spec))
    written(into)
    return into if result is given[0] else result


def _marked(result: Any, given: Sequence[Any], x: SplitTensor) -> Any:
    """A view of a gathered tensor as one of the tensor itself."""
    first = given[0] if given else None
    if not isinstance(result, Tensor) or not isinstance(first, Tensor):
        return result
    if result.device.type == "meta" or not share_memory(result, first):
        return result
    bare = Spec(x.spec.context, tuple(result.shape), layout_of(x.spec.mesh, [()] * result.dim()), tuple(result.shape))
    made = enter(result.view_as(result), bare)
    if share_memory(first, x):
        return as_view(made, x)
    made.link = standing_for(x, first)
    return made


MEMORY = {
    Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__, Tensor.share_memory_,
}  # fmt: skip


@rule(Tensor.__repr__, Tensor.__format__, Tensor.__str__)
def _printed(func: Any, x: Any, *args: Any, **kwargs: Any) -> str:
    return f"SplitTensor({x.spec}, from '{x.spec.origin}')"


@rule(Tensor.as_subclass)
def _bare(func: Any, x: SplitTensor, kind: type) -> Any:
    return x if kind is SplitTensor else whole(x).as_subclass(kind)


@rule(*getters("data"))
def _numbers(func: Any, x: SplitTensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        made = enter(leave(x).data, x.spec)
    made.strides = x.strides
    return as_view(made, x)


@rule(*getters("grad", "_grad"))
def _grad(func: Any, x: SplitTensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        grad = func(x)
    return None if grad is None else enter(grad.view_as(grad), x.spec)


@rule(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
def _hooked(func: Any, x: SplitTensor, hook: Callable[[Any], Any]) -> Any:
    """A hook gets a gradient that lies as the tensor does, with the sizes of the whole."""

    def on_shard(grad: Tensor) -> Tensor | None:
        result = hook(enter(grad.view_as(grad), x.spec) if grad is not x else x)
        if isinstance(result, SplitTensor):
            result = result if result.spec == x.spec else whole(result)
        return leave(result) if isinstance(result, SplitTensor) else None if result is None else cut(result, x.spec)

    with torch._C.DisableTorchFunctionSubclass():
        return func(x, on_shard)


@rule(torch.autograd.grad)
def _gradients(func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Gradients by tensors that are split lie as these do."""
    if split_in([outputs]) or split_in([*args, *kwargs.values()]):
        return NotImplemented
    asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    with torch._C.DisableTorchFunctionSubclass():
        found = func(outputs, asked, *args, **kwargs)
    return tuple(
        enter(grad.view_as(grad), x.spec) if isinstance(x, SplitTensor) and grad is not None else grad
        for x, grad in zip(asked, found, strict=True)
    )


@rule(torch.autograd.backward, Tensor.backward)
def _backward(func: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Run backward with gradients that lie as the tensors do, as autograd hands them to a checkpoint."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads = [grad_tensors] if isinstance(grad_tensors, Tensor) or grad_tensors is None else list(grad_tensors)
    with torch._C.DisableTorchFunctionSubclass():
        if len(grads) != len(given) or any(g is None or g.shape != x.shape for x, g in zip(given, grads, strict=True)):
            return NotImplemented
        bare = [leave(g) if isinstance(g, SplitTensor) else g for g in grads]
        return torch.autograd.backward(given, bare, *args, **kwargs)
