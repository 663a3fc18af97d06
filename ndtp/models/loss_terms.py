"""The terms of a loss, as autograd's graph has them: means over how many numbers, or sums.

Where `dp` splits a batch, the loss of the whole is the sum of what ranks compute of their rows, each in proportion to
what it is a mean of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_NODES = 1024  # of a graph between a loss and its terms
PASSED = {
    "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Clone", "ToCopy", "Alias", "View", "ReshapeAlias", "Reshape", "Squeeze",
    "Unsqueeze", "Stack", "Cat", "Mean", "Sum", "Select", "Unbind", "Expand", "UnsafeView", "Permute", "T", "_Reduce",
}  # fmt: skip
# Other forms of one number; a sum of what is split is added up over the ranks that have its parts.
FORMS = {"View", "ReshapeAlias", "Reshape", "Squeeze", "UnsafeView", "Clone", "_Reduce"}
JOINED = ("Stack", "Cat")  # several losses in one tensor
MEAN, SUM = 1, 2  # as torch numbers reductions


@dataclass(frozen=True)
class Term:
    """One term of a loss.

    Attributes:
        kind: "mean", "sum", "numbers" (of which it is not known what they are summed for), or "" for anything else.
        count: of a mean, of how many numbers, weighted as the mean weights them.
    """

    kind: str
    count: Any = None


def terms_of(loss: Tensor, known: Sequence[Tensor]) -> list[Term]:
    """Return the terms of a loss beside those that are known."""
    seen: set[Any] = {term.grad_fn for term in known if term.grad_fn is not None}
    waiting: list[Any] = [loss.grad_fn]
    found = list[Term]()
    for _ in range(MOST_NODES):
        waiting = [node for node in waiting if node is not None and node not in seen]
        if not waiting:
            return found
        node = waiting.pop()
        seen.add(node)
        term = _term(node)
        if term is None:
            waiting += [each for each, _ in node.next_functions]
        else:
            found.append(term)
    return [*found, Term("")]


def _term(node: Any) -> Term | None:
    """Return the term that a node of the graph computes; None of one that combines terms.

    It depends on no size of a dim, of which ranks have different ones.
    """
    name, before = _kind(node), _before(node)
    if hasattr(node, "_saved_reduction"):
        if node._saved_reduction == MEAN:
            weight = getattr(node, "_saved_total_weight", None)
            return Term("mean", node._saved_self.numel() if weight is None else weight)
        return Term("sum" if node._saved_reduction == SUM else "")
    if name == "Mean" and _is_of_numbers(node):
        return Term("mean", node._saved_self_sym_numel)
    while name == "Div" and _kind(before) in FORMS:
        before = _before(before)
    if name == "Div" and _kind(before) == "Sum" and _is_of_numbers(before):
        return Term("mean", node._saved_other)
    if name == "Sum" and _is_of_numbers(node):
        first = _before(node)
        steps = [first, *(each for each, _ in first.next_functions)] if first is not None else []
        return Term("sum" if any("CtcLoss" in _kind(each) for each in steps) else "numbers")  # where it is finite, too
    return None if name in PASSED else Term("")


def _kind(node: Any) -> str:
    """Return the name of a node's operation: "Mul" of MulBackward0 and MulBackward1."""
    return "" if node is None else str(node.name()).partition("Backward")[0]


def _before(node: Any) -> Any:
    return node.next_functions[0][0] if node is not None and node.next_functions else None


def _is_of_numbers(node: Any) -> bool:
    """Return whether a sum or mean is of other numbers than of several losses, or of one."""
    return len(node._saved_self_sym_sizes) > 0 and _kind(_before(node)) not in JOINED


def slopes(total: Tensor, parts: Sequence[Tensor]) -> list[Any]:
    """Return the derivative of a loss by each of its terms; 0 where it has none."""
    wanted = [part for part in parts if part.requires_grad]
    if not total.requires_grad or not wanted:
        return [0] * len(parts)
    made = torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)
    found = {id(part): slope for part, slope in zip(wanted, made, strict=True) if slope is not None}
    return [found.get(id(part), 0) for part in parts]
