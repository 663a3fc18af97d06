"""The split tensor: any model's code between two products, by one table of rules.  See `ndtp.split.tensor`."""

from ndtp.split import (  # noqa: F401  (their rules enter the table)
    along,
    attention,
    contractions,
    elementwise,
    indexing,
    layers,
    multihead,
    views,
)
from ndtp.split.functions import guard_functions
from ndtp.split.hooked_gradients import guard_backward_hooks
from ndtp.split.moving import brought, cut, moved
from ndtp.split.register import register_rule
from ndtp.split.spec import Context, Spec, spec_of
from ndtp.split.tensor import SplitTensor, enter, leave, split_in
from ndtp.split.whole import whole

__all__ = [
    "Context",
    "Spec",
    "SplitTensor",
    "brought",
    "cut",
    "enter",
    "guard_backward_hooks",
    "guard_functions",
    "leave",
    "moved",
    "register_rule",
    "spec_of",
    "split_in",
    "whole",
]
