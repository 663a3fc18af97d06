"""`parameters_kept`: what a model's code writes to its parameters in a run of ndtp's own is written in the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.runtime.facts import is_strided
from ndtp.split.gathered_operands import root_of
from ndtp.split.tensor import writes


class _Saving(TorchFunctionMode):
    """Copies a parameter before the first function that may write to its memory.

    A mode of functions and none of operations, in which torch has no `torch.compile`, and so no flex attention.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._of_memory = {root_of(p): p for p in parameters}
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if writes(func) or "out" in kwargs or any(x is True for x in given):  # `inplace=True`
            with torch._C.DisableTorchFunction():
                for x in tree_leaves(given):
                    self._save(x)
        return func(*args, **kwargs)

    def _save(self, x: object) -> None:
        if isinstance(x, Tensor):
            memory = root_of(x)
            p = self._of_memory.get(memory)
            if p is not None and memory not in self.saved:
                self.saved[memory] = p, p.detach().clone()


@contextmanager
def parameters_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restore the numbers and the memory of parameters when it is left; not those of a class of their own."""
    parameters = [p for p in parameters if type(p) is nn.Parameter and is_strided(p) and not p.is_meta]
    if not parameters:
        yield
        return
    before = [p.detach() for p in parameters]
    saving = _Saving(parameters)
    try:
        with saving:
            yield
    finally:
        for p, own in zip(parameters, before, strict=True):
            if p.data_ptr() != own.data_ptr():
                p.data = own
        for p, numbers in saving.saved.values():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):  # type: ignore[attr-defined]
                p.copy_(numbers)
