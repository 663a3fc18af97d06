"""The modules of a step that is a CUDA graph: what a forward asks of them, and of torch, is in the graph as it was."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.errors import CaptureError

_IS_TRAINING, _TAKES_GRADIENTS = attrgetter("training"), attrgetter("requires_grad")


class HeldModules:
    """The modules that a step calls.

    Args:
        device: of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._modules: list[nn.Module] = []
        self._parameters: list[Tensor] = []
        self._names: dict[int, str] = {}  # by the identity of a module or parameter
        self._training: list[bool] = []
        self._gradients: list[bool] = []
        self._modes: dict[str, Any] = {}

    def hold(self, called: Iterable[nn.Module]) -> None:
        """Remember what the graph that was captured holds of the modules that were called, and of those in them."""
        modules: dict[int, nn.Module] = {}
        parameters: dict[int, Tensor] = {}
        for each in called:
            if id(each) in modules:
                continue
            kind = type(each).__name__
            for name, module in each.named_modules():
                modules[id(module)] = module
                self._names.setdefault(id(module), f"{kind}.{name}".rstrip("."))
            for name, parameter in each.named_parameters():
                parameters[id(parameter)] = parameter
                self._names.setdefault(id(parameter), f"{kind}.{name}")
        self._modules, self._parameters = list(modules.values()), list(parameters.values())
        self._training = list(map(_IS_TRAINING, self._modules))
        self._gradients = list(map(_TAKES_GRADIENTS, self._parameters))
        self._modes = self._modes_now()

    def check(self) -> None:
        """Refuse what was set since the capture, which a replay does not look at.

        Raises:
            CaptureError: names what was set.
        """
        if (now := list(map(_IS_TRAINING, self._modules))) != self._training:
            self._refuse("training", self._modules, now, self._training)
        if (now := list(map(_TAKES_GRADIENTS, self._parameters))) != self._gradients:
            self._refuse("requires_grad", self._parameters, now, self._gradients)
        for name, mode in self._modes_now().items():
            if mode != self._modes[name]:
                raise CaptureError(
                    f"ndtp.capture: {name} is {mode}, the graph has {self._modes[name]}\n"
                    "  fix: set it inside of the step, or capture the step anew"
                )

    def _refuse(self, attribute: str, of: list[Any], now: list[bool], held: list[bool]) -> None:
        i = next(i for i, (is_now, was) in enumerate(zip(now, held, strict=True)) if is_now != was)
        raise CaptureError(
            f"ndtp.capture: {attribute} of {self._names[id(of[i])]} is {now[i]}, the graph has {held[i]}\n"
            "  fix: set it back before the step, or capture the step anew"
        )

    def _modes_now(self) -> dict[str, object]:
        kind = self.device.type
        is_cast = torch.is_autocast_enabled(kind)
        return {
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "the dtype of torch.autocast": torch.get_autocast_dtype(kind) if is_cast else None,
        }
