"""Whether ranks compare the calls of a model: `compare_calls` has them do so from then on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ndtp.models.called import called_parts
from ndtp.models.same_calls import SameCalls
from ndtp.runtime.facts import Fact, digest, hash_of
from ndtp.runtime.points import Point, compare_once
from ndtp.runtime.process_grid import ProcessGrid


def calls_of(model: nn.Module) -> SameCalls | None:
    """The comparison of the calls of a model; None where there is none."""
    hooked = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((each for each in hooked if isinstance(each, SameCalls)), None)


def compare_generated(model: nn.Module, given: Any) -> None:
    """Compare the tokens that `generate` has given: the last one is the input of no call."""
    calls, tokens = calls_of(model), getattr(given, "sequences", given)
    is_tokens = type(tokens) is Tensor and not (tokens.is_meta or tokens.is_floating_point())
    if calls is not None and calls.is_on and is_tokens:
        what = f"end of generate after call {calls.calls} of {calls.name}"
        facts = [Fact("sampled tokens: values", f"hash {int(hash_of(tokens)):x}", calls.rows)]
        compare_once(calls.mesh, Point(what, None, [fact[:2] for fact in facts], facts=lambda: facts), calls.rows)


def entries_of(model: nn.Module) -> list[nn.Module]:
    """The modules by which a model is called: itself or its parts, and models of transformers inside of it."""
    inner = [m for m in model.modules() if any(k.__name__ == "PreTrainedModel" for k in type(m).__mro__)]
    return [*dict.fromkeys([model, *called_parts(model), *inner])]


def compare_calls(
    model: nn.Module,
    mesh: ProcessGrid,
    rows: Sequence[str] = (),
    scheme: str = "",
    check: bool | None = None,
    every: int = 100,
) -> None:
    """Compare every call of a model between ranks from now on, see `SameCalls`; once for a model.

    Args:
        rows: the axes along which ranks have rows of their own.
        scheme: by which it was split.
        check: whether they compare at all.

    Raises:
        ValueError: `every` is no positive number.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"parallelize: check_every={every!r} is not an integer of at least 1")
    if check is False or calls_of(model) is not None:
        return
    report = vars(model).get("ndtp_report")
    how = [f"{name} {what}" for name, what in getattr(report, "replaced", {}).items()]
    made_by = f"scheme {scheme!r} on grid {mesh.grid} ({digest(how):016x})" + f", {mesh.wire}" * bool(mesh.wire)
    nontrivial = mesh.grid.nontrivial(tuple(rows))
    SameCalls(model, mesh, nontrivial, made_by, check, every).watch(entries_of(model))
