"""Optimizers inside of a CUDA graph: their counts and learning rates are tensors, and what the graph holds stays so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.errors import CaptureError
from ndtp.runtime.arrival import local_of
from ndtp.runtime.memories import Memories

_PLAIN = (bool, int, float, str, tuple, type(None))


class HeldOptimizers:
    """The optimizers that a step uses.

    Args:
        device: of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.optimizers: list[Optimizer] = []
        self._rates: dict[int, Tensor] = {}  # by the identity of a group, which lives as long as its optimizer
        self._settings: list[dict[str, Any]] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []
        self._is_stale = ""
        self._changes = 0  # of memories of parameters
        self._memories: list[tuple[Tensor, Tensor]] = []  # of parameters, which a graph reads and so must stay

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make the optimizers whose step begins inside ready for graphs."""

        def before(optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> None:
            if not any(optimizer is known for known in self.optimizers):
                self._prepare(optimizer)

        hook = register_optimizer_step_pre_hook(before)
        try:
            yield
        finally:
            hook.remove()

    def _prepare(self, optimizer: Optimizer) -> None:
        self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True  # its count of steps lies on the device
            elif "fused" in group:
                group["fused"], group["foreach"] = True, False  # takes a learning rate as a tensor, unread by the host
            self._rates[id(group)] = group["lr"] = self._rate(group["lr"])
        for parameter, state in optimizer.state.items():
            step = state.get("step")
            if isinstance(step, Tensor) and step.device != local_of(parameter).device:
                state["step"] = step.to(local_of(parameter).device)
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def _rate(self, rate: Any) -> Tensor:
        value = rate.detach().to(torch.float32) if isinstance(rate, Tensor) else torch.tensor(float(rate))
        return value.to(self.device, copy=True)

    def _loaded(self, optimizer: Optimizer) -> None:
        self._is_stale = f"the state of {type(optimizer).__name__} was loaded after the capture"

    def hold(self) -> None:
        """Remember what the graph that is about to be captured will hold."""
        self._settings = [_settings(group) for group in self._groups()]
        self._grads = [(p, p.grad) for p in self._parameters()]
        self._changes, self._memories = Memories.changes, [(p, local_of(p).detach()) for p in self._parameters()]

    def check_gradients(self) -> None:
        """Refuse a step that leaves other gradients than it found: a replay would not add to them.

        Raises:
            CaptureError: names how many parameters.
        """
        before = [(p, grad) for p, grad in self._grads if (grad is None) != (p.grad is None)]
        if before:
            raise CaptureError(
                f"ndtp.capture: the step leaves gradients of {len(before)} parameters that it did not find, or drops "
                "those that it found; a replay would neither add to them nor drop them\n"
                "  fix: zero_grad() at the end of the step"
            )
        self._grads = [(p, p.grad) for p, grad in self._grads if p.grad is not None]

    def take_over_rates(self) -> None:
        """Bring learning rates that were set since to where the step reads them."""
        for group in self._groups():
            rate, now = self._rates.get(id(group)), group["lr"]
            if rate is None:  # of a group that was added
                self._rates[id(group)] = group["lr"] = self._rate(now)
            elif now is not rate:
                rate.copy_(now) if isinstance(now, Tensor) else rate.fill_(float(now))
                group["lr"] = rate

    def check_settings(self) -> None:
        """Refuse what was set since the capture, which the graph has as it was.

        Raises:
            CaptureError: names what was set.
        """
        if self._is_stale:
            raise CaptureError(f"ndtp.capture: {self._is_stale}\n  fix: capture the step anew")
        groups = list(self._groups())
        if len(groups) != len(self._settings):
            raise CaptureError(
                "ndtp.capture: an optimizer has other groups than the graph\n  fix: capture the step anew"
            )
        for group, settings in zip(groups, self._settings, strict=True):
            changed = [name for name, value in _settings(group).items() if value != settings.get(name)]
            if changed:
                name = changed[0]
                raise CaptureError(
                    f"ndtp.capture: {name} of an optimizer is {group[name]!r}, the graph has {settings.get(name)!r}\n"
                    "  fix: capture the step anew; learning rates alone may change"
                )
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                raise CaptureError(
                    f"ndtp.capture: the gradient of a parameter {tuple(parameter.shape)} is another one than the graph "
                    "adds to\n  fix: zero_grad() at the end of the step, inside of it"
                )

        if Memories.changes != self._changes:
            for parameter, memory in self._memories:
                if local_of(parameter).data_ptr() != memory.data_ptr():
                    raise CaptureError(
                        f"ndtp.capture: a parameter {tuple(parameter.shape)} was given other memory by .data = since "
                        "the capture, and the graph computes with the one of before\n  fix: p.copy_(x) under "
                        "torch.no_grad(), or give it that of before for the step"
                    )
            self._changes = Memories.changes

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _parameters(self) -> Iterator[Tensor]:
        for group in self._groups():
            yield from group["params"]


def _settings(group: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name not in ("lr", "initial_lr") and type(value) in _PLAIN}
