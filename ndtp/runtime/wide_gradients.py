"""Gradients of 16-bit parameters that add up in fp32 over several backwards.

A `.grad` of 16 bits rounds at each micro-batch, and what comes late is less than half of the last bit of what is there.
Here each parameter has an fp32 sum beside `.grad`, which is that sum, rounded once.  Whatever else writes to `.grad`
(zeroing, clipping, unscaling) begins a new sum with what it has written.
Source: `accumulate_allreduce_grads_in_fp32` of Megatron-LM.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ndtp.runtime.versions import version_of

_OWN = "ndtp_wide_gradient"  # the attribute of a parameter


class WideGradient:
    """The fp32 sum of one parameter's gradients: this rank's shard, of the memory of two 16-bit ones."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = ref(parameter)
        self._total: Tensor | None = None  # None: `.grad` has all that there is
        self._seen: Any = None  # `.grad` as the sum was rounded to it last, and its version
        self._came: Any = None
        parameter.register_hook(self._note)
        parameter.register_post_accumulate_grad_hook(self._end)
        setattr(parameter, _OWN, self)

    @torch.no_grad()
    def _note(self, gradient: Tensor) -> None:
        """Keep what comes, before autograd adds it to `.grad`."""
        parameter: Any = self._parameter()
        grad = parameter.grad
        if grad is None:
            self._total = None
        elif self._seen is None or self._seen[0] is not grad or self._seen[1] != version_of(grad):
            self._total = _local(grad).float()
        self._came = None if gradient.is_sparse else gradient.detach()

    def _end(self, parameter: object) -> None:
        came, self._came = self._came, None
        if came is not None:
            self.add(_local(came))

    @torch.no_grad()
    def add(self, came: Tensor) -> None:
        """Add this rank's shard of a gradient to the sum, and round it to `.grad`."""
        parameter: Any = self._parameter()
        self._total = came.float() if self._total is None else self._total + came.float()
        _local(parameter.grad).copy_(self._total)
        self._seen = parameter.grad, version_of(parameter.grad)


def wide_gradient_of(parameter: object) -> WideGradient | None:
    """Return the fp32 sum of a parameter's gradients, if it has one."""
    return vars(parameter).get(_OWN)  # type: ignore[no-any-return]


def sum_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which gradients of a parameter add up before their all-reduce."""
    return parameter.dtype if wide_gradient_of(parameter) is None else torch.float32


def _local(x: Any) -> Tensor:
    """Return this rank's shard of a tensor on the grid; any other tensor as it is."""
    return getattr(x, "_local_tensor", x)  # type: ignore[no-any-return]


@torch.no_grad()
def add_to_gradient(parameter: Any, came: Tensor) -> None:
    """Add this rank's shard of a gradient to `.grad`, which there is."""
    wide = wide_gradient_of(parameter)
    if wide is None:
        _local(parameter.grad).add_(came)
    else:
        wide.add(came)
