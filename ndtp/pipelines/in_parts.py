"""The backward of a stage in two parts, gradients of inputs first, where torch has one that is right.

Before torch 2.13 it loses nodes of `autograd.Function` between the two, takes the gradients of a node with several
results for those of the first, and counts some twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

IN_PARTS = torch.__version__ >= "2.13"  # of versions, not of words


def whole_backward(given: Mapping[str, Any]) -> dict[str, object]:
    """Return what the whole backward of torch takes in the place of what its first part takes: a loss is no tuple."""
    outputs = given["stage_output"]
    return {**given, "stage_output": outputs[0] if given["output_grads"] is None else outputs}
