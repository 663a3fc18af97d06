"""Code that asks whether a tensor is of `torch.Tensor` itself: it goes another way where a split layer gave the tensor.

Python asks nobody what `type(x)` is, so nothing can answer there as for the dense model.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from itertools import takewhile

from torch import nn

from ndtp.errors import warn
from ndtp.models.forward_code import functions_of, parts_of

_REACH = 10  # instructions from `type` to `Tensor`
_KNOWN = ("torch.", "ndtp.", "transformers.")  # code that was tried, class by class


def warn_of_asked_types(model: nn.Module) -> None:
    """Warn of each place in the code of a model's forward that compares the type of something with `torch.Tensor`."""
    told = set()
    for kind in {type(module): None for module in model.modules()}:
        parts = [part for function in functions_of(kind, _KNOWN) for part in parts_of(function.__code__)]
        for code, line in [(part, line) for part in parts for line in _lines(part)]:
            if (code, line) in told:
                continue
            told.add((code, line))
            warn(
                f"ndtp: the code of {kind.__name__} compares a type with torch.Tensor ({code.co_filename}, "
                f"line {line}); what a split layer gives is of a class that derives from it, so that this code may go "
                "another way than in the dense model\n  fix: isinstance(x, torch.Tensor)"
            )


def _lines(code: types.CodeType) -> Iterator[int]:
    """Yield the lines in which code compares `type(x)` or `x.__class__`, or `type(x).__name__`, with `Tensor`."""
    if "Tensor" not in (*code.co_names, *code.co_freevars, *code.co_consts):
        return
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        if step.argval != "Tensor" or not step.opname.startswith("LOAD"):
            continue
        before = steps[max(0, i - _REACH) : i]
        among = list(takewhile(lambda each: each.opname.startswith(("LOAD", "BUILD")), steps[i + 1 :]))
        after = steps[i + 1 + len(among)] if i + 1 + len(among) < len(steps) else step
        is_asked = any(each.argval in ("type", "__class__") for each in before if each.opname.startswith("LOAD"))
        is_one = after.opname == "IS_OP" or (after.opname == "COMPARE_OP" and "=" in after.argrepr)
        is_of_several = after.opname == "CONTAINS_OP" and any(each.opname.startswith("BUILD") for each in among)
        if is_asked and ((is_one and not among) or is_of_several):
            yield [line for offset, line in dis.findlinestarts(code) if offset <= step.offset][-1] or 0
