"""The types of what torch hands to code that stands in for its functions, and of what autograd hands to a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TorchFunction = Callable[..., Any]  # of `torch`, or an operation of `torch.ops`
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
AutogradContext = Any  # takes any attribute, of which torch's own class declares none
