"""`register_rule`: how a function, operator, kernel or `autograd.Function` of somebody else takes shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.errors import LayoutError
from ndtp.split.elementwise import elementwise
from ndtp.split.moving import moved
from ndtp.split.tensor import TABLE, SplitTensor, enter, leave
from ndtp.split.views import with_dims_at


def register_rule(func: TorchFunction, rule: str | Callable[..., object], whole_dims: Sequence[int] = (-1,)) -> None:
    """Tell how a function that is not torch's takes split tensors; without a rule it gets them whole, gathered.

    Args:
        func: a function that asks `__torch_function__`, an operator of `torch.ops`, or an `autograd.Function`.
        rule: "elementwise" for what acts element by element, with broadcasting; "batch" for what treats each index of
            its first operand's dims alone, but for those of `whole_dims`, and gives a result of as many dims; or a
            function `rule(func, *args, **kwargs)` that gives the result, or `NotImplemented` for the whole tensors.
        whole_dims: for "batch", the dims that must be whole.

    Raises:
        LayoutError: a rule of another name.
    """
    if callable(rule):
        TABLE[func] = rule
    elif rule == "elementwise":
        TABLE[func] = elementwise
    elif rule == "batch":
        TABLE[func] = lambda f, x, *args, **kwargs: _batch(f, x, whole_dims, args, kwargs)
    else:
        raise LayoutError(f"register_rule: {rule!r} is neither 'elementwise' nor 'batch' nor a function")


def _batch(func: TorchFunction, x: Any, whole_dims: Sequence[int], args: Arguments, kwargs: Keywords) -> object:
    if not isinstance(x, SplitTensor) or any(isinstance(y, Tensor) for y in (*args, *kwargs.values())):
        return NotImplemented
    count = len(x.spec.sizes)
    lost = {d % count for d in whole_dims}
    x = moved(x, [() if d in lost else axes for d, axes in enumerate(x.spec.dims)])
    result = func(leave(x), *args, **kwargs)
    if not isinstance(result, Tensor) or result.dim() != count:
        return NotImplemented
    sizes = [x.spec.sizes[d] if x.spec.dims[d] else size for d, size in enumerate(result.shape)]
    return enter(result.view_as(result), with_dims_at(x.spec, sizes, list(range(count))))
