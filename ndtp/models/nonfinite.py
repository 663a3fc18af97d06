"""`find_nonfinite`: the first module, phase and rank where a NaN or Inf comes up, without waiting for the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.collectives.labels import Label
from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.models.noted import Noted
from ndtp.models.pending import Pending
from ndtp.models.state_entries import mesh_of_model
from ndtp.nn.experts import Experts
from ndtp.runtime.arrival import local_of
from ndtp.runtime.crew import crew_of

_MOST = 4096  # flags on the device, until they are put together


@dataclass(frozen=True)
class NonFinite:
    """The place of the first NaN or Inf.

    Attributes:
        module: the name of the module; "" for the model itself.
        phase: "forward" or "backward".
        ranks: of the grid, that had it there.
        what: of the module it was: "its output", "what it sent: reduce_scatter[x] mlp.up C", ...
        parameters: of the model, that are not finite on some of its ranks, when this was asked.
    """

    module: str
    phase: str
    ranks: tuple[int, ...]
    what: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"module '{self.module}'" if self.module else "the model"
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        beside = f"; parameters that are not finite: {', '.join(self.parameters)}" if self.parameters else ""
        return f"NaN or Inf first in {where}, {self.phase}, on {ranks}: {self.what}{beside}"


class find_nonfinite:
    """Watch a model, on a grid or on none, for the first NaN or Inf.

        with ndtp.find_nonfinite(model) as watch:
            model(x).sum().backward()
        print(watch.first())        # None, or: NaN or Inf first in module 'layers.1.mlp', forward, on rank 2: ...

    Each module's input, output and their gradients, and what each collective of the model's grid sends, leave one flag
    on the device; `first` reads them all at once.  What a collective sends tells the rank where it came up from those
    that it is sent to.

    A fused block whose parts have hooks runs part by part: slower than without, and with the same numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.mesh = model, mesh_of_model(model)
        self._names: list[tuple[str, str, str] | _Gradient] = []
        self._flags: list[Tensor] = []
        self._done: list[Tensor] = []
        self._gradients: dict[int, tuple[weakref.ref[Tensor], _Gradient]] = {}
        self._running: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> find_nonfinite:
        parts = {id(each) for m in self.model.modules() if isinstance(m, Experts) for each in m.children()}
        for name, module in self.model.named_modules():
            if id(module) in parts:  # which experts on a grid do not call, unless somebody looks at them
                continue
            self._handles += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                module.register_forward_hook(self._after(name), always_call=True),
            ]
        if self.mesh is not None:
            self.mesh.step.recording.inspector = self._sends
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.mesh is not None:
            self.mesh.step.recording.inspector = None

    def first(self) -> NonFinite | None:
        """The first that came up since this was asked; the same on all ranks of the grid.  A collective there."""
        flags = self._read()
        at = next((i for i, flag in enumerate(flags) if flag), None)
        mine = None if at is None else [at, *(str(each) for each in self._named(at))]
        bad = [name for name, each in self.model.named_parameters() if at is not None and not _is_finite(each)]
        self._names.clear()
        self._gradients.clear()
        said = crew_of(self.mesh).gather([mine, bad])
        found = {rank: each for rank, (each, _) in said.items() if each is not None}
        if not found:
            return None
        earliest = min(each[0] for each in found.values())
        ranks = tuple(sorted(rank for rank, each in found.items() if each[0] == earliest))
        _, module, phase, what = found[ranks[0]]
        parameters = dict.fromkeys(name for _, names in said.values() for name in names)
        return NonFinite(module, phase, ranks, what, tuple(parameters))

    # ------------------------------------------------------------------------------------------------ while it runs

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
            self._running.append(name)
            for x in _tensors((args, kwargs)):
                if not name:
                    self._note(x, ("", "forward", "its input"))
                self._follow(x, consumer=name)

        hook.takes_shards = True  # type: ignore[attr-defined]
        return hook

    def _after(self, name: str) -> object:
        def hook(module: nn.Module, args: Arguments, result: object) -> None:
            if self._running and self._running[-1] == name:
                self._running.pop()
            for x in _tensors(result):
                self._note(x, (name, "forward", "its output"))
                self._follow(x, producer=name)

        hook.takes_shards = True  # type: ignore[attr-defined]
        return hook

    def _sends(self, label: Label, x: Tensor) -> None:
        phase = "forward" if label.phase == "forward" else "backward"
        module = self._running[-1] if self._running else ""
        self._note(x, (module, phase, f"what this rank sends in {label.title}"))

    def _note(self, x: Tensor, name: tuple[str, str, str] | _Gradient) -> None:
        flag = _flag(x)
        if flag is not None:
            self._names.append(name)
            self._flags.append(flag)
            if len(self._flags) == _MOST:
                self._done.append(torch.stack(self._flags))
                self._flags.clear()

    def _follow(self, x: Tensor, producer: str = "", consumer: str | None = None) -> None:
        """Have a look at the gradient of a tensor when it comes: one hook, whoever made and whoever reads it."""
        known = self._gradients.get(id(x))
        if known is None or known[0]() is not x:
            with torch._C.DisableTorchFunctionSubclass():
                if not x.requires_grad or not torch.is_grad_enabled():
                    return
                gradient = _Gradient(producer)
                x.register_hook(lambda grad: self._note(grad, gradient))
            self._gradients[id(x)] = weakref.ref(x), gradient
        else:
            gradient = known[1]
        if consumer is not None and gradient.is_of(consumer):
            gradient.consumer = consumer

    # ------------------------------------------------------------------------------------------------------- afterwards

    def _read(self) -> list[bool]:
        pieces = [*self._done, *([torch.stack(self._flags)] if self._flags else [])]
        self._done.clear()
        self._flags.clear()
        return torch.cat(pieces).tolist() if pieces else []

    def _named(self, at: int) -> tuple[str, str, str]:
        name = self._names[at]
        return name.named() if isinstance(name, _Gradient) else name


class _Gradient:
    """The gradient of an activation, which one module made and the backward of another one gives."""

    def __init__(self, producer: str) -> None:
        self.producer = producer
        self.consumer: str | None = None

    def is_of(self, reader: str) -> bool:
        """Whether it is named by this reader: the first, or a part of it that is handed the same."""
        return self.consumer is None or not self.consumer or reader.startswith(f"{self.consumer}.")

    def named(self) -> tuple[str, str, str]:
        if self.consumer is not None:
            return self.consumer, "backward", "the gradient of its input"
        return self.producer, "backward", "the gradient that comes to its output"


def _flag(x: Any) -> Tensor | None:
    """Whether a tensor has a NaN or Inf, on its device, of this rank's part; None for what has no such numbers."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        x = local_of(x)
        if not (x.is_floating_point() or x.is_complex()) or x.is_meta or not x.numel() or x.layout != torch.strided:
            return None
        x = x.detach().float() if x.element_size() == 1 else x.detach()
        return ~torch.isfinite(torch.linalg.vector_norm(x, float("inf")))


def _is_finite(x: object) -> bool:
    flag = _flag(x)
    return flag is None or not bool(flag)


def _tensors(x: object) -> Iterator[Tensor]:
    """Yield the tensors in lists, mappings and a model's outputs, except those that are still to be computed."""
    if isinstance(x, Pending):
        x = x.result
    if isinstance(x, Noted):
        return
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for each in x.values():
            yield from _tensors(each)
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from _tensors(each)
