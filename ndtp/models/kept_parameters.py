"""`parameters_kept`: what a model's code writes to its parameters in a run of ndtp's own is written in the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ndtp.runtime.facts import is_strided


class _Saving(TorchDispatchMode):
    """Copies a parameter before the first operation that writes to its memory."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._of_memory = {_memory(p): p for p in parameters}
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._save(given.get(argument.name))
        return func(*args, **kwargs)

    def _save(self, written: Any) -> None:
        for x in tree_leaves(written):
            if isinstance(x, Tensor) and is_strided(x) and not x.is_meta:
                memory = _memory(x)
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


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # type: ignore[no-any-return]
