"""`SplitTensor`: a tensor with the sizes of the whole, of which a rank has a shard.

A model's own code gets it in the place of an activation and calls torch's functions on it.  Each function has a rule in
one table: what it does with each dim tells where the operands must lie and how the result lies.  A function without a
rule gets the whole tensor, gathered: right, counted, and reported.  There is no way on which code sees a shard and
takes it for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ndtp.errors import LayoutError
from ndtp.split.spec import Spec

Rule = Callable[..., Any]
TABLE: dict[Any, Rule] = {}


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Put a rule into the table.  It is called as `rule(func, *args, **kwargs)`, and may give `NotImplemented`."""

    def put(made: Rule) -> Rule:
        TABLE.update(dict.fromkeys(functions, made))
        return made

    return put


def getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


# Facts that depend on neither the numbers nor on how they lie.
FACTS = {
    *getters(
        "_backward_hooks", "_version", "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
        "is_nested", "is_quantized", "is_sparse", "layout", "output_nr", "requires_grad", "is_mps", "is_xpu",
        "is_mkldnn", "is_sparse_csr", "is_mtia", "itemsize", "names", "retains_grad",
    ),
    *[getattr(Tensor, name).__set__ for name in ("requires_grad", "_backward_hooks")],
    Tensor.__hash__, Tensor.get_device, Tensor.is_complex, Tensor.is_floating_point, Tensor.is_signed,
    torch.is_complex, torch.is_floating_point, torch.is_tensor, Tensor.requires_grad_, Tensor.retain_grad,
    Tensor.element_size, Tensor.is_inference, torch.is_inference,
}  # fmt: skip
SHAPE = {*getters("shape")}
SIZES = {
    *getters("ndim", "nbytes"), Tensor.__len__, Tensor.dim, Tensor.numel, Tensor.size, torch.numel, Tensor.nelement,
    Tensor.ndimension, Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset,
}  # fmt: skip


class SplitTensor(Tensor):
    """A shard; its sizes are those of the whole, `spec.sizes`."""

    spec: Spec

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SHAPE:
            return torch.Size(args[0].spec.sizes)
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in SIZES:
            return func(like(args[0]), *args[1:], **kwargs)
        found = TABLE.get(func)
        if found is not None:
            result = found(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return on_whole(func, args, kwargs)

    def gathered(self) -> Tensor:
        """The whole tensor, on every rank (of its data-parallel rank); a collective."""
        return whole(self)


def like(x: SplitTensor) -> Tensor:
    """A tensor without memory that has the sizes of the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(x.spec.sizes, dtype=x.dtype, device="meta")


def enter(shard: Tensor, spec: Spec) -> SplitTensor:
    """`shard`, which nobody else has, as a tensor of the whole's sizes."""
    if type(shard) is not SplitTensor:
        shard.__class__ = SplitTensor
    shard.spec = spec  # type: ignore[attr-defined]
    return shard  # type: ignore[return-value]


def leave(x: Tensor) -> Tensor:
    """The shard, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.view_as(x)


def whole(x: Any) -> Any:
    """The whole tensor of a split one, on every rank; a collective.  Anything else as it is."""
    if not isinstance(x, SplitTensor):
        return x
    from ndtp.split.moving import moved

    return leave(moved(x, [()] * len(x.spec.sizes)))


def split_in(x: Any) -> list[SplitTensor]:
    """The split tensors among the operands of a function, in lists, tuples and mappings as well."""
    if isinstance(x, SplitTensor):
        return [x]
    if isinstance(x, Mapping):
        x = list(x.values())
    return [found for each in x for found in split_in(each)] if isinstance(x, (list, tuple)) else []


def mapped(x: Any, change: Callable[[SplitTensor], Any]) -> Any:
    """Operands with `change` applied to each split tensor."""
    if isinstance(x, SplitTensor):
        return change(x)
    if isinstance(x, dict):
        return {name: mapped(value, change) for name, value in x.items()}
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        made = [mapped(value, change) for value in x]
        return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)
    return x


IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


def name_of(func: Any) -> str:
    """`softmax`; of an attribute that is read, its own name."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        name = "." + str(getattr(func.__self__, "__name__", "attribute"))
    return name.strip("_") or name


def writes(func: Any) -> bool:
    """Whether a function of torch changes its first operand, by its name."""
    name = str(getattr(func, "__name__", ""))
    return name in ("__setitem__", "__set__") or name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def on_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the function gives of the whole tensors.

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
        x.spec.context.note(name, x.spec)
    into = args[0] if args and isinstance(args[0], SplitTensor) and writes(func) else None
    given = mapped(list(args), whole)
    result = func(*given, **mapped(dict(kwargs), whole))
    if into is None:
        return result
    from ndtp.split.moving import cut

    with torch._C.DisableTorchFunctionSubclass():
        into.copy_(cut(given[0], into.spec))
    return into if result is given[0] else result


MEMORY = {
    Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__, Tensor.share_memory_,
}  # fmt: skip


@rule(Tensor.__repr__, Tensor.__format__, Tensor.__str__)
def _printed(func: Any, x: Any, *args: Any, **kwargs: Any) -> str:
    return f"SplitTensor({x.spec}, from '{x.spec.origin}')"


@rule(Tensor.as_subclass)
def _bare(func: Any, x: SplitTensor, kind: type) -> Any:
    return x if kind is SplitTensor else whole(x).as_subclass(kind)


@rule(*getters("grad", "_grad"))
def _grad(func: Any, x: SplitTensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        grad = func(x)
    return None if grad is None else enter(grad.view_as(grad), x.spec)


@rule(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
def _hooked(func: Any, x: SplitTensor, hook: Callable[[Any], Any]) -> Any:
    """A hook gets a gradient that lies as the tensor does, with the sizes of the whole."""
    from ndtp.split.moving import cut

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
    """With gradients that lie as the tensors do, as autograd passes them on to a checkpoint's."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads = [grad_tensors] if isinstance(grad_tensors, Tensor) or grad_tensors is None else list(grad_tensors)
    with torch._C.DisableTorchFunctionSubclass():
        if len(grads) != len(given) or any(g is None or g.shape != x.shape for x, g in zip(given, grads, strict=True)):
            return NotImplemented
        bare = [leave(g) if isinstance(g, SplitTensor) else g for g in grads]
        return torch.autograd.backward(given, bare, *args, **kwargs)
