"""Layers that ranks with rows of their own do not all use: experts without tokens, layers that one rank leaves out.

Each use of a weight ends in a sum of its gradient over the axes whose ranks have rows of their own, at a point of
backward that depends on the order of products.  Ranks that have used other weights would wait for each other there.  So
the sums of such a backward wait until it ends, as under `ProcessGrid.accumulate`; then the ranks tell each other of
which weights they hold one, and start them in the order of the model's parameters, with zeros where a rank has none.
Source: `find_unused_parameters` of Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import nn

from ndtp.algebra.steps import Step
from ndtp.collectives.conversation import Conversation
from ndtp.errors import MismatchError, warn
from ndtp.ops.moving import way_of
from ndtp.runtime.arrival import local_of
from ndtp.runtime.facts import SUMMARY, Fact
from ndtp.runtime.gradient_ends import end_of
from ndtp.runtime.moves import Move
from ndtp.runtime.partial_sums import PartialSum, reduce_in_order
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.runtime.step_state import COMPUTED, EARLIER

_KIND = "weight_gradients"  # of what travels, for the wire
_USES, _ORDER = "uses of the weights of", f"{SUMMARY}the uses of weights, in order"
MAY_DIFFER = _USES, _ORDER  # begin the topics in which ranks with other rows may differ


def facts_of_uses(uses: Sequence[str], model: nn.Module, mesh: ProcessGrid) -> Iterator[Fact]:
    """Yield the weights that were used before a backward; called in it."""
    may_wait = _adds_to_parameters(model) and not mesh.step.partial_sums.in_turns
    for name, count in Counter(filter(None, uses)).items():
        when = f" {EARLIER}".removesuffix(": ") if name.startswith(EARLIER) else " before it"
        name = name.removeprefix(EARLIER)
        if name.startswith(COMPUTED):
            yield Fact(f"uses of {COMPUTED}the weights of '{name.removeprefix(COMPUTED)}'{when}", count)
        else:
            what = _USES if may_wait else "uses, whose gradients cannot wait, of the weights of"
            yield Fact(f"{what} '{name}'{when}", count)
    yield Fact(_ORDER, _hash_of(name for name in uses if not name.startswith(COMPUTED)))
    yield Fact(f"{SUMMARY}the uses of computed weights, in order", _hash_of(n for n in uses if n.startswith(COMPUTED)))


def _hash_of(names: Iterator[str]) -> str:
    return f"hash {crc32(chr(10).join(names).encode()):08x}"


def _adds_to_parameters(model: nn.Module) -> bool:
    """Return whether the backward that goes on adds to the `.grad` of parameters; that of `torch.autograd.grad` does
    not.
    """
    try:
        return any(torch._C._will_engine_execute_node(end_of(p)) for p in model.parameters() if p.requires_grad)
    except RuntimeError:  # torch's answer for a leaf that `torch.autograd.grad` was given
        return False


class WaitingBackward:
    """A backward whose sums over the ranks with rows of their own wait until it ends.

    Autograd holds it until the end of that backward, and lets it go where the backward breaks off: then what it has
    held back is dropped.
    """

    def __init__(self, mesh: ProcessGrid, conversation: Conversation) -> None:
        self._mesh, self._conversation = mesh, conversation
        self._sums = mesh.step.partial_sums
        self._sums.depth += 1
        self._waits = True

    def __del__(self) -> None:
        if self._waits:
            self._sums.depth -= 1
            self._sums.discard()

    def end(self) -> str:
        """Sum what any rank has, and add it to `.grad` on all of them; return a parameter that a rank did not use."""
        self._waits = False
        self._sums.depth -= 1
        return reduce_on_all(self._mesh, self._conversation)


def reduce_held(mesh: ProcessGrid) -> None:
    """Sum the gradients that any rank holds back, as `ProcessGrid.reduce_gradients` does; a collective."""
    conversation = mesh.groups.conversation()
    if conversation is None:
        mesh.step.partial_sums.finish()
    else:
        reduce_on_all(mesh, conversation)


def reduce_on_all(mesh: ProcessGrid, conversation: Conversation) -> str:
    """Sum the gradients that any rank holds back, and add them to `.grad` on all of them; a collective.

    Returns:
        The name of a parameter of which a rank holds none; "" where all hold the same.

    Raises:
        MismatchError: ranks hold sums that lie otherwise, or some of tensors that no model of the grid has.
    """
    parameters = {
        f"{calls.number} {name}": p
        for calls in sorted(mesh.step.watched, key=lambda each: each.number)
        if (model := calls.held) is not None
        for name, p in model.named_parameters()
    }
    names = {id(p): name for name, p in reversed(parameters.items())}  # the first name of a shared one
    held = mesh.step.partial_sums.taken()
    others = [each for each in held if id(each.leaf) not in names]  # of no model
    mine = {names[id(each.leaf)]: each for each in held if id(each.leaf) in names}
    forms = {name: _form_of(each) for name, each in mine.items()} | {"": [_form_of(each) for each in others]}
    told = [json.loads(text) for text in conversation.texts(json.dumps(forms))]
    known: dict[str, Any] = {}
    for name, form in (item for each in told for item in each.items()):
        if known.setdefault(name, form) != form:
            what = f"'{name.partition(' ')[2]}'" if name else "tensors of no model of the grid"
            raise MismatchError(
                f"ranks of grid {mesh.grid} hold back other gradients of {what}: {known[name]} and {form}\n"
                "  fix: the same layers on every rank; layer(x[mask]) where a rank has no rows for one"
            )
    order = [name for name in parameters if name in known]
    sums = [_sum(name, parameters[name], known[name], mine.get(name), mesh) for name in order]
    reduce_in_order(others + sums)
    return next((name.partition(" ")[2] for name in order if any(name not in each for each in told)), "")


def _sum(
    name: str, leaf: nn.Parameter, form: Mapping[str, Any], mine: PartialSum | None, mesh: ProcessGrid
) -> PartialSum:
    tensor = local_of(leaf).new_zeros(form["shape"]) if mine is None else mine.tensor.to(leaf.dtype)
    steps = [Step(kind, tuple(axes), *dims) for kind, axes, *dims in form["steps"]]
    move = Move(way_of(tensor, steps, mesh, name.partition(" ")[2], "wgrad", _KIND), tensor, hold=True)
    return PartialSum(leaf, 0, tensor, move)


def _form_of(held: PartialSum) -> dict[str, object]:
    steps = [[step.kind, list(step.axes), step.dim, step.source] for step in held.move.held_steps]
    return {"shape": list(held.tensor.shape), "steps": steps}


def warn_of(name: str, model: str, rows: Sequence[str]) -> None:
    """Warn of ranks that do not all use the same layers."""
    warn(
        f"ndtp: ranks with rows of their own used other layers of {model}, such as that of '{name}': the sums of its "
        f"gradients over {' '.join(rows)} waited for the end of backward, where nothing hides them; a layer that is "
        "called without rows, layer(x[mask]), keeps them in step"
    )
