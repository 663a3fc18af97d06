"""Signals between ranks that share one device: kernels of one warp, each in the order of the current stream."""

from __future__ import annotations

from torch import Tensor


def put_signal(signal: Tensor) -> None:
    """Raise an int32 on the current stream, when it is down."""
    from ndtp_kernels.triton_code.signals import put_signal_kernel

    put_signal_kernel[(1,)](signal, num_warps=1)


def take_signal(signal: Tensor) -> None:
    """Lower an int32 on the current stream, when it is up."""
    from ndtp_kernels.triton_code.signals import take_signal_kernel

    take_signal_kernel[(1,)](signal, num_warps=1)
