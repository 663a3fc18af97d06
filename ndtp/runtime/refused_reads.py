"""The error for code that reads a split parameter beside plain tensors, with the place of that code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ndtp.errors import LayoutError


def is_whole_tensor(x: object) -> bool:
    """A plain tensor that is no number."""
    return isinstance(x, Tensor) and x.dim() > 0 and not isinstance(x, DTensor)


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


def _reader() -> tuple[str, str]:
    """Return what reads a parameter, and where: the innermost frame that is neither torch's nor ndtp's."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "ndtp"):
        frame = frame.f_back
    own = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    code = f"the code of {type(own).__name__}" if isinstance(own, torch.nn.Module) else frame.f_code.co_name
    return code, f"{frame.f_code.co_filename}, line {frame.f_lineno}"
