"""`CarvedGemm`: torch's products on a part of a device's multiprocessors; the others are left to collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndtp.compute.gemm import Multiply, TorchGemm

HOPPER = 9  # of compute capability: cuBLAS's products on older devices know no such limit


def can_carve_out(device_type: str) -> bool:
    """Return whether torch can keep its products off some multiprocessors of the devices of this type."""
    if device_type != "cuda" or not hasattr(torch._C, "_set_sm_carveout_experimental"):
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= HOPPER


class CarvedGemm(TorchGemm):
    """Torch's products, which leave multiprocessors to collectives; outside of them torch's setting is the user's.

    cuBLAS takes the limit for a hint, on Blackwell above all.

    Args:
        sms_to_leave: the number of multiprocessors.
    """

    def __init__(self, sms_to_leave: int) -> None:
        self.sms_to_leave = sms_to_leave

    def bound(self, *what: Any, **how: Any) -> Multiply:
        """See `TorchGemm.bound`."""
        product, leave = super().bound(*what, **how), self.sms_to_leave

        def run(a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
            before = torch._C._get_sm_carveout_experimental()
            torch._C._set_sm_carveout_experimental(leave)
            try:
                return product(a, b, **out)
            finally:
                torch._C._set_sm_carveout_experimental(before)

        return run
