"""A run of a model that may be on the meta device, where tensors have shapes and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ndtp.models.dry_step import OfWholeBatches


@contextmanager
def runnable(model: nn.Module) -> Iterator[None]:
    """A context in which a model on meta runs: reading a number gives an answer, and experts give the shape they
    take.
    """
    if not next(model.parameters()).is_meta:
        yield
        return
    named: Any = (
        (m, p) for m in model.modules() for p in m._parameters.values() if "expert" in type(m).__name__.lower()
    )
    experts: list[Any] = list({id(m): m for m, p in named if p is not None and p.dim() == 3}.values())
    for each in experts:  # whose rows depend on the routing
        each.forward = _given
    try:
        with OfWholeBatches():
            yield
    finally:
        for each in experts:
            del each.forward


def _given(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    return hidden_states.clone()
