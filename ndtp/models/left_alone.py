"""Layers that `parallelize` leaves as they are: why, and what they need so that they can stay that."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ndtp.models.adopted import class_of
from ndtp.models.computed import is_computed
from ndtp.models.hidden import Hidden, whole
from ndtp.models.roles import is_linear, is_of_own_class
from ndtp.runtime.arrival import is_plain


def is_foreign(module: nn.Module) -> bool:
    """Return whether only a module's own code reads its weights: quantised ones, a tensor class of its own, or none."""
    own = [p for p in module._parameters.values() if p is not None]
    return any(map(_is_own, own)) or _hides_weight(module)


def _is_own(p: nn.Parameter) -> bool:
    return is_of_own_class(p) or (is_plain(p) and p.is_complex())


def _hides_weight(module: nn.Module) -> bool:
    """A layer like a Linear without a matrix among its parameters: packed, or of integers in buffers."""
    if "Linear" not in type(module).__name__ or is_linear(module) or not hasattr(module, "in_features"):
        return False
    return all(p.dim() < 2 for p in module.parameters())


def why_left(module: Any) -> str | None:
    """Return the reason why a layer like a Linear, or one that holds several, is not split; None for another layer."""
    own = {key: p for key, p in module._parameters.items() if p is not None}
    weight = own.get("weight")  # not by getattr: a parametrization that computes it may change its buffers
    kind = type(module).__name__
    if _hides_weight(module):
        return f"it is a {module._get_name()}, whose weight is no parameter: quantised, and only its own code reads it"
    if is_foreign(module):
        key, first = next((k, p) for k, p in own.items() if _is_own(p))
        if first.is_complex():
            return f"it is a {kind}, whose {key} is of complex numbers, which are not split"
        of = type(first).__name__ if first.is_floating_point() else str(first.dtype).removeprefix("torch.")
        return f"it is a {kind}, whose {key} is of {of}: quantised, or a tensor class that only its own code reads"
    if is_linear(module):
        return None
    if isinstance(module, nn.Linear) and is_computed(module):
        return "a parameter of it is computed from others, as weight norms and pruning do, and those are split"
    if isinstance(module, nn.Linear) and type(module).__module__.startswith("torch."):
        return f"it is a {kind}, whose weight torch's code reads past it"
    if is_linear(module, casts=True):
        return f"it is a {kind}, which casts its weight or its input"
    if isinstance(module, nn.Linear):
        return f"it is a {kind}, a subclass of nn.Linear that computes something else"
    is_matrix = any(x is not None and x.dim() >= 2 for x in (*own.values(), *module._buffers.values()))
    if ("Linear" in kind or "Conv1D" in kind) and is_matrix:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else "no weight"
        return f"it is a {kind} ({shape}), neither an nn.Linear nor a Conv1D of transformers"
    experts = [f"{key} {tuple(p.shape)}" for key, p in own.items() if p.dim() == 3]
    if experts and "expert" in kind.lower():
        return f"it holds weights of several experts, {', '.join(experts)}"
    return None


class TakesWhole(nn.Module):
    """A module left as it is, whose code may not be torch's functions: it gets whole tensors, gathered before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self, "ndtp_name", type(self).__name__)
        given = [_whole(x, name) for x in args]
        return super().forward(*given, **{key: _whole(x, name) for key, x in kwargs.items()})  # type: ignore[misc]


def _whole(x: Any, name: str) -> Any:
    if not isinstance(x, Hidden):
        return x
    x.passage.frame.note(f"'{name}', which was left alone,", x.passage)
    return whole(x)


def leave_alone(module: nn.Module, name: str) -> None:
    if not isinstance(module, TakesWhole):
        module.__class__ = class_of(TakesWhole, type(module))
        module.ndtp_name = name  # type: ignore[assignment]
