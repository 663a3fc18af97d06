"""Modes of torch: a dry run has no autocast, whatever is on around it."""

import torch

from ndtp.compute.traces import is_autocast_on


def test_a_dry_run_has_no_autocast():
    """torch knows no autocast of tensors without memory, and refuses the question."""
    assert not is_autocast_on("meta") and not is_autocast_on("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_autocast_on("meta") and is_autocast_on("cpu")
