"""The devices whose work is ordered by streams: CUDA's, and those that a stand-in of `ndtp.testing.cuda` plays."""

from __future__ import annotations

from typing import Any

import torch

STREAMED = {"cuda"}


def has_streams(device_type: str) -> bool:
    """Return whether work on such a device runs behind the host, in the order of streams."""
    return device_type in STREAMED


def is_capturing(device_type: str) -> bool:
    """Return whether what is launched now goes into a CUDA graph instead of running."""
    return device_type in STREAMED and torch.cuda.is_current_stream_capturing()


def mark() -> object:
    """The current stream, in the cheapest form that `stream_of` takes."""
    return torch._C._cuda_getCurrentStream(torch.cuda.current_device())


def stream_of(mark: Any) -> torch.cuda.Stream:
    """The stream that was current where a mark was made, on whichever thread."""
    stream_id, device_index, device_type = mark
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
