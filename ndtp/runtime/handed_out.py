"""Parameters of a grid that code outside of layers computes with, and what their gradients are then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from ndtp.errors import LayoutError
from ndtp.runtime.at_work import at_work
from ndtp.runtime.caller import callers
from ndtp.runtime.grid_autograd import PutInPlace
from ndtp.runtime.grid_parts import lying_as, part_of

_PUT_ON = {"apply", "global_unstructured", "register_parametrization", "spectral_norm"}  # of torch.nn.utils
_CALLS = {nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__}
_MOVING = {nn.Parameter.__new__.__code__, nn.Module._apply.__code__}
_SUMS = "ndtp_sums_gradients"  # of layers on a grid
_MOST_FRAMES = 48  # between one of these and an operation


def is_sum(gradient: object) -> bool:
    """Whether a compiled layer gave it, which has summed it over all ranks, see `GridTensor.to_local`."""
    return type(gradient) is DTensor or getattr(gradient, "ndtp_is_sum", False)


def note_mixed(terms: Sequence[Any], made: Any) -> None:
    """Note of what autograd has added up that it is neither a sum of all ranks nor a gradient of this one."""
    if torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
        return
    if any(map(is_sum, terms)) and not all(map(is_sum, terms)) and hasattr(made, "_dtensor"):
        made.ndtp_has_sum = True


def note_use(parameter: Any) -> None:
    """Note that code outside of the layers computes with a tensor, which may be a parameter in a graph of autograd.

    A number has plain gradients, also where it was made of a parameter (`p.sum()`).  They become ones of the grid here,
    and those that layers give become such beside which torch adds plain ones up.
    """
    if not torch.is_grad_enabled() or not parameter.requires_grad or not parameter.is_leaf:
        return
    if torch.compiler.is_compiling():
        return
    own = vars(parameter)
    # Of a model whose ranks have other rows.  In its forward layers compute with shards, and what else is code's.
    if "ndtp_hand_out" in own and (at_work() is None or _is_read_by_others(parameter)):
        if "ndtp_set_aside" not in own and not _is_put_on():
            hand_out(parameter)
    elif not own.get("ndtp_is_handed") and not own.get("ndtp_summed_over") and not own.get("ndtp_is_read"):
        parameter.ndtp_is_handed = True
        kind, dtensor, real = type(parameter), parameter._dtensor, parameter.ndtp_real

        def put(grad: Any) -> Any:
            if isinstance(grad, (kind, DTensor)) or grad.shape != real:
                return None
            if grad.requires_grad:  # `create_graph=True`
                return PutInPlace.apply(grad, dtensor.placements, dtensor.device_mesh, dtensor.shape, kind)  # type: ignore[no-untyped-call]
            return kind(lying_as(part_of(grad.detach(), dtensor), dtensor), False, real)

        parameter.register_hook(put)


def is_moved() -> bool:
    """Return whether torch moves a parameter with its module, as by `model.to`."""
    return any(frame.f_code in _MOVING for frame in callers(_MOST_FRAMES))


def _is_read_by_others(parameter: object) -> bool:
    """Return whether code in a forward computes with a parameter as it is, so that nobody sums what it gives.

    A hook of a layer, as of a weight norm, and a parametrization compute the layer's weight, whose gradient the layer
    sums.  What a module reads of its own comes as a plain tensor, whose gradient is summed.
    """
    own = vars(parameter)
    if own.get("ndtp_is_read") or "ndtp_set_aside" in own:
        return False
    calls = (frame.f_locals["self"] for frame in callers(_MOST_FRAMES) if frame.f_code in _CALLS)
    makers = (each for each in calls if isinstance(each, ParametrizationList) or hasattr(each, _SUMS))
    return not any(parameter is each for maker in makers for each in maker._parameters.values())


def _is_put_on() -> bool:
    """Return whether torch computes a weight as it puts a norm, a pruning or a parametrization on a layer: each forward
    computes that weight again.
    """
    return any(
        frame.f_code.co_name in _PUT_ON and str(frame.f_globals.get("__name__")).startswith("torch.nn.utils.")
        for frame in callers(_MOST_FRAMES)
    )


def set_aside(parameter: Any, take: Callable[[Any], object]) -> None:
    """Let `take` have what layers give of a parameter from now on, see `GridTensor`."""
    parameter.ndtp_set_aside = take


def refuse_within_backward(name: str, axes: Sequence[str]) -> None:
    """Refuse the gradient of a parameter that the backward of an autograd function asks `torch.autograd.grad` for.

    A layer gives the sum of all ranks.  What the function makes of that may come back as the parameter's gradient, like
    what other code gives of it, which is each rank's own.

    Raises:
        LayoutError: names the parameter and the function.
    """
    asks = False
    for frame in callers(_MOST_FRAMES):
        asks |= frame.f_code is torch.autograd.grad.__code__
        if asks and frame.f_code is BackwardCFunction.apply.__code__:
            function = type(frame.f_locals["self"]).__name__.removesuffix("Backward")
            raise LayoutError(
                f"parallelize: the backward of {function} asks torch.autograd.grad for the gradient of '{name}', on a "
                f"grid whose ranks have rows of their own ({', '.join(axes)}): layers give the sum of all ranks, and "
                "code that computes with a parameter gives what is this rank's\n"
                "  fix: z in the place of dp, which splits rows, too; or what autograd derives by itself in the place "
                f"of {function}, as torchdiffeq's odeint for its odeint_adjoint"
            )


def hand_out(parameter: Any) -> bool:
    """Have what code gives of a parameter summed over ranks with other rows, from now on; False where it cannot be."""
    own = vars(parameter)
    if "ndtp_set_aside" not in own:
        if "ndtp_hand_out" not in own:
            return False
        parameter.ndtp_is_handed = True
        own["ndtp_hand_out"]()
    return True
