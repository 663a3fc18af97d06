"""Tests whose tensors lie on another device, "cuda" or "emulated": `NDTP_TEST_DEVICE` names it for ranks and pytest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ndtp.collectives.backends import GLOO, backends_of_host
from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.testing import emulated

TEST_DEVICE = "NDTP_TEST_DEVICE"


def prepare_test_device() -> None:
    """Compile the emulated device, where it is the one: ranks that are about to start have a time limit for theirs."""
    if os.environ.get(TEST_DEVICE) == emulated.NAME:
        emulated.build()


def use_test_device(rank: int | None = None) -> str:
    """Make the device that `NDTP_TEST_DEVICE` names torch's default device in this thread, for good.

    Ranks share the GPUs that there are, and convolutions compute in fp32.  Numbers that are drawn with a generator of
    the CPU are drawn there and copied, so that they are the same on every device.

    Args:
        rank: of a process that is about to join a process group.

    Returns:
        the backend of the process groups of this device.
    """
    device_type = os.environ.get(TEST_DEVICE)
    if not device_type:
        return GLOO.name
    if device_type == emulated.NAME:
        emulated.start()
    if device_type == "cuda":
        if rank is not None:
            share_gpu(rank)
            os.environ["NCCL_MAX_CTAS"] = "2"  # of tiny messages
        torch.backends.cudnn.set_flags(_allow_tf32=False)  # torch's default: convolutions of ten bits
    torch.set_default_device(device_type)
    _DrawnWhereTheGeneratorIs().__enter__()
    if device_type == emulated.NAME:
        return emulated.BACKENDS
    return backends_of_host() if device_type == "cuda" else GLOO.name


def share_gpu(rank: int) -> torch.device:
    """Let several ranks of NCCL have one GPU, before the first process group is made; returns this rank's device.

    NCCL refuses two ranks of one host on a GPU.  Each rank therefore is a host of its own for NCCL, which then sends
    through sockets: all of NCCL's kernels, streams and orders are as on many nodes, and its speed says nothing.  The
    communicators have small buffers, of which many fit on the GPU.
    """
    os.environ["NCCL_HOSTID"] = f"rank {rank}"
    os.environ.update(NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ["NCCL_BUFFSIZE"] = str(1 << 20)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class _DrawnWhereTheGeneratorIs(TorchFunctionMode):
    """A factory with a generator of another device than the default one, which torch refuses."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if generator is None or kwargs.get("device") is not None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if any(isinstance(x, Tensor) for x in args):
            return func(*args, **kwargs)
        needs_gradient = kwargs.pop("requires_grad", False)
        drawn = func(*args, **kwargs, device=generator.device).to(torch.get_default_device())
        return drawn.requires_grad_() if needs_gradient else drawn
