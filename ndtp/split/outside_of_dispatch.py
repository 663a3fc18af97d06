"""Scripts, transforms of `torch.func`, `plain.data =` and backwards that are given gradients get whole tensors.

They take tensors by their memory, and none of them asks `__torch_function__`.  Within a transform a split tensor that a
function has from outside of it is taken whole, too: a rule would see one entry of the batch, or a tensor of another
level, and take it for a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor

from ndtp.collectives.torch_patches import replaced
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.grid_tensor import GridTensor
from ndtp.split.tensor import IN_TRANSFORM, SplitTensor, mapped, rule, split_in
from ndtp.split.whole import on_whole, whole

_TRANSFORMS = ("torch._functorch.vmap._add_batch_dim", "torch._functorch.eager_transforms._wrap_for_grad")
_PLAIN = (Tensor, nn.Parameter)
_SCRIPTS = ("torch.jit.ScriptFunction.__call__", "torch.ScriptMethod.__call__")


def whole_in_scripts_and_transforms() -> None:
    """Have scripts and transforms take split tensors, and parameters of a grid, whole."""
    for target in _TRANSFORMS:
        replaced(target, _of_whole)
    replaced("torch._functorch.eager_transforms._autograd_grad", _from_whole)
    for target in _SCRIPTS:
        replaced(target, _on_whole)
    replaced("torch.Tensor.data", _Data)
    replaced("torch.autograd._make_grads", _of_whole_tensors)


@rule(IN_TRANSFORM)
def whole_in_transform(x: Any) -> Any:
    """The whole of a split tensor or of a parameter on the grid, gathered outside of all transforms; else as it is."""
    if isinstance(x, SplitTensor):
        x.spec.context.note("torch.func", x.spec)
        with temporarily_clear_interpreter_stack():
            return whole(x)
    if is_plain(x):
        return x
    with temporarily_clear_interpreter_stack():
        return x.full_tensor()


def _of_whole(enter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap what takes a tensor into a level of a transform."""

    def entered(x: object, *where: object) -> Tensor:
        return enter(whole_in_transform(x), *where)

    return entered


def _from_whole(derive: Callable[..., Any]) -> Callable[..., object]:
    """Wrap what computes gradients within a level, from those that code gives to `vjp`."""

    def derived(*args: Any, **kwargs: Any) -> object:
        return derive(*mapped(args, whole_in_transform, Tensor), **kwargs)

    return derived


def _on_whole(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(script: Any, *args: Any, **kwargs: Any) -> Any:
        if not split_in([*args, *kwargs.values()]):
            return call(script, *args, **kwargs)
        return on_whole(_Script(call, script), args, kwargs)

    return called


class _Script:
    """A script, by its name."""

    def __init__(self, call: Callable[..., Any], script: Any) -> None:
        self._call, self._script, self.__name__ = call, script, f"the script '{script.name}'"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._script, *args, **kwargs)


class _Data:
    """The attribute `data` of a tensor.  A plain one takes the whole of what is split: it has no other memory."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __get__(self, owner: Any, kind: object = None) -> Any:
        return self._given if owner is None else self._given.__get__(owner)

    def __set__(self, owner: Any, value: Any) -> None:
        if type(value) not in _PLAIN and not (isinstance(owner, DTensor) or hasattr(type(owner), "gathered")):
            value = _whole_of(value)
        self._given.__set__(owner, value)

    def __delete__(self, owner: Any) -> None:
        self._given.__delete__(owner)


def _whole_of(x: object) -> object:
    """Return the whole of what is split, without a graph; anything else as it is."""
    x = x.gathered() if hasattr(x, "gathered") else x
    return x.full_tensor().detach() if isinstance(x, GridTensor) else x


def _of_whole_tensors(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what checks the gradients that a backward begins with: those of whole tensors are whole."""

    def made(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        if any(each is not None and type(each) not in _PLAIN for each in gradients):
            pairs = zip(outputs, gradients, strict=True)
            gradients = [_whole_of(each) if type(out) in _PLAIN else each for out, each in pairs]
        return make(outputs, gradients, *args, **kwargs)

    return made
