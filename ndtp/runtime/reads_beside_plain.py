"""Code that reads a split parameter beside plain tensors, with its place: an error, or a word of what is gathered."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from ndtp.errors import LayoutError, warn
from ndtp.runtime.at_work import AT_WORK, at_work

_TOLD = set[tuple[str, str]]()  # parameters, and where code reads them


def is_whole_tensor(x: object) -> bool:
    """A plain tensor that is no number."""
    return isinstance(x, Tensor) and x.dim() > 0 and not isinstance(x, DTensor)


def is_plain_beside(x: Any, flat: Sequence[Any]) -> bool:
    """Whether a DTensor beside plain tensors is to be one, too: every rank has it whole, and code reads it.

    A term of the loss that is made of a layer's parameter alone goes on as one of the grid, as its gradient does.
    """
    if not all(placement.is_replicate() for placement in x.placements) or getattr(x, "is_padded", False):
        return False
    if getattr(x, "ndtp_is_read", False):
        return True
    return any(is_whole_tensor(y) and not fits(y, x.shape) for y in flat)


def is_read_beside_wholes(func: torch._ops.OpOverload, flat: Sequence[Any]) -> bool:
    """Whether code reads parameters of a model beside plain tensors that are whole, as those outside of its forward.

    In a forward all plain tensors are, but for those of an attention that runs on the heads of a rank.

    What a constant of a parameter's sizes gives with it element by element stays on the grid.  Gradients of plain
    tensors are plain.
    """
    mine = [x for x in flat if isinstance(x, DTensor)]
    if AT_WORK.local or not all(getattr(x, "ndtp_of_model", False) for x in mine):
        return False
    plain = [x for x in flat if is_whole_tensor(x)]
    if torch.Tag.pointwise not in func.tags or not all(fits(x, y.shape) for x in plain for y in mine):
        return True
    if torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
        return torch.is_grad_enabled() and any(x.requires_grad for x in plain)
    return any(any(x.stride()) for x in plain)  # the gradient of a sum is a number that was expanded


def fits(x: Tensor, shape: Any) -> bool:
    try:
        return torch.broadcast_shapes(x.shape, shape) == shape
    except RuntimeError:
        return False


def refused(what: str, split: Any, flat: Sequence[Any]) -> LayoutError:
    """Return the error of an operation on a split parameter and plain tensors."""
    name, (code, where) = getattr(split, "ndtp_name", ""), _reader()
    owner, what_it_is = name.removeprefix("gradient of ").rpartition(".")[0], f"'{name}'" if name else "a parameter"
    shapes = ", ".join(str(tuple(x.shape)) for x in flat if is_whole_tensor(x))
    others = f"tensors that are not, {shapes}" if shapes else "tensors that are not"
    keep = f"; or parallelize(..., keep=['{owner}']), which leaves it whole" if owner else ""
    return LayoutError(
        f"ndtp: {code} reads {what_it_is} {tuple(split.shape)}, which is split over ranks, in {what} beside {others}\n"
        f"  at {where}\n"
        "  fix: call the layer that has it; or take the whole of it, p.full_tensor(), a collective; or compute in "
        f"`with ndtp.nn.as_dense():` where every rank has the same plain tensors, as an optimizer's{keep}"
    )


def warn_of_gathered(flat: Sequence[Any]) -> None:
    """Say once that the whole of a split parameter is gathered in each call, for code in a forward that reads it."""
    if at_work() is None:
        return
    code, where = _reader()
    for split in (x for x in flat if isinstance(x, DTensor) and not all(map(Placement.is_replicate, x.placements))):
        name = getattr(split, "ndtp_name", "").removeprefix(".")
        if (name, where) not in _TOLD:
            _TOLD.add((name, where))
            warn(
                f"ndtp: {code} reads '{name}' {tuple(split.shape)}, which is split over ranks, beside tensors that are "
                f"not; its whole is gathered for that in each call\n  at {where}\n"
                "  fix: call the layer that has it, which computes with its parts"
            )


def _reader() -> tuple[str, str]:
    """Return what reads a parameter, and where: the innermost frame that is neither torch's nor ndtp's."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "ndtp"):
        frame = frame.f_back
    own = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    code = f"the code of {type(own).__name__}" if isinstance(own, torch.nn.Module) else frame.f_code.co_name
    return code, f"{frame.f_code.co_filename}, line {frame.f_lineno}"
