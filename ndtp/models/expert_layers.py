"""The experts of a stock model on a grid: transformers' blocks of a router, experts in two fused weights, and MLPs.

The router stays the model's own code: its product with hidden states that are split gives logits that every rank has
whole (`ndtp.models.hidden`), and what it makes of them is the same everywhere.  Experts take hidden states as they lie,
and of the choices those of their rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.algebra.expert_plan import expert_plan
from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.row_flow import even_split
from ndtp.algebra.schemes import BlockLayouts
from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.models.adopted import Adopted, adopt
from ndtp.models.frame import Frame
from ndtp.models.hidden import Hidden, enter, leave, split, whole
from ndtp.models.whole_rows import are_few
from ndtp.nn.experts import Experts
from ndtp.nn.hooks import parts_have_hooks
from ndtp.nn.padding import padded_to, zero_padding
from ndtp.ops.moving import taken
from ndtp.ops.products import relayout
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.halves import as_it_lies

UP, DOWN = "gate_up_proj", "down_proj"
TAKES = ("hidden_states", "top_k_index", "top_k_weights")


@dataclass(frozen=True)
class ExpertsRole:
    """Sizes and activation of the experts of one block."""

    count: int
    hidden: int
    inner: int
    activation: str


def experts_role(module: nn.Module, hidden: int) -> ExpertsRole | str | None:
    """Return the role of experts in transformers' form; a reason for experts of another form; None for any other
    module.
    """
    own = {key: p for key, p in module._parameters.items() if p is not None}
    if not (any(p.dim() == 3 for p in own.values()) and "expert" in type(module).__name__.lower()):
        return None
    shapes = [f"{key} {tuple(p.shape)}" for key, p in own.items()]
    reason = f"it holds weights of several experts, {', '.join(shapes)}"
    if set(own) != {UP, DOWN}:
        return reason
    (count, both, wide), (_, out, inner) = own[UP].shape, own[DOWN].shape
    takes = tuple(inspect.signature(type(module).forward).parameters)[1:4]
    if (both, wide, out) != (2 * inner, hidden, hidden) or takes != TAKES or module._modules.keys() - {"act_fn"}:
        return f"{reason}, in another form than [experts, 2 inner, {hidden}] and [experts, {hidden}, inner]"
    gate = getattr(type(module), "_apply_gate", None)
    plain = gate is None or gate.__name__ == "_default_apply_gate"
    if not plain or not getattr(module, "is_concatenated", True) or getattr(module, "has_post_expert_norm", False):
        return f"{reason}, and more than an activation of the gate lies between them"
    activation = named_activation(getattr(module, "act_fn", None))
    if activation is None:
        return f"{reason}, whose activation is none that ndtp.nn.MLP knows"
    return ExpertsRole(count, hidden, inner, activation)


def named_activation(function: Any) -> str | None:
    """The name of an activation, found by trying it."""
    at = torch.linspace(-7.3, 7.1, 41, dtype=torch.float64)
    try:
        found = function(at)
    except Exception:
        return None
    for name, known in ACTIVATIONS.items():
        if known.width == 1 and torch.allclose(found.double(), known.forward(at), rtol=1e-6, atol=1e-7):
            return name
    return None


class SplitExperts(Adopted, Experts):
    """The experts of a block: those of `ndtp.nn.experts.Experts`, between hidden states that are split.

    Attributes:
        layouts: of the hidden states, in and out.
        width: their features with padding.
        last: leading dims of the last forward's tokens.
        named: the function of which `activation` is the name, in a tuple, where it is no part of the module.
    """

    layouts: BlockLayouts
    width: int
    last: tuple[int, ...]
    named: tuple[Any]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # type: ignore[override]
        function = self._modules.get("act_fn", vars(self).get("act_fn"))
        if function is not self.named[0]:
            self.named, self.activation = (function,), named_activation(function) or ""
        if not self.activation or parts_have_hooks(self):  # hooks, which this forward does not call
            return self._as_dense(hidden_states, top_k_index, top_k_weights)
        lies, tokens, mesh, frame = self.layouts.input, self.plan.tokens, self.mesh, self.frame
        x = hidden_states
        is_whole = are_few(x, self)
        if isinstance(x, Hidden) and (x.passage.layout != lies or x.passage.width != self.width):
            frame.note(f"'{self.name}', which takes [{lies.label('MK')}],", x.passage)
            x = whole(x)
        x = x if isinstance(x, Hidden) else split(x, frame, lies, self.width, self.name)
        passage, rows = x.passage, leave(x)
        if passage.width != passage.features:
            rows = zero_padding(rows, lies, mesh, passage.features)
        count, top_k = passage.rows, top_k_index.shape[1]
        if rows.is_meta:  # in a dry run: routed as the last forward, or evenly
            here = count // frame.splits(tokens) * top_k
            even = [list(even_split(here, self.count))] * mesh.grid.size(self.plan.count_axes)
            self.expected = self.last_counts if self.last == passage.lead and self.last_counts else even, 0
        self.last = passage.lead
        held = Layout(mesh.grid, tokens.dims[0], None)
        outside = Layout(mesh.grid, frame.outside.dims[0], None)
        gates = relayout(passage.laid(top_k_weights), outside, held, mesh, f"{self.name}.gates")
        choice = passage.laid(top_k_index, self.count)
        choice = relayout(choice, outside, held, mesh, f"{self.name}.choice")
        kept = choice < self.count
        y = Experts.forward(self, self._moved(rows, lies, tokens), choice.clamp(max=self.count - 1), gates, kept)
        y = self._moved(y, tokens, lies)
        y = enter(y.view_as(y), replace(passage, came_from=self.name))
        return whole(y) if is_whole else y

    def held(self, name: str) -> Tensor | None:
        """A parameter as it lies; on a grid of one rank it is a plain one, whose halves lie one behind the other."""
        found = super().held(name)
        return as_it_lies(found, 4) if name == UP and found is not None and is_plain(found) else found

    def _as_dense(self, hidden_states: Tensor, *choices: Tensor) -> Tensor:
        """Return the result of the model's own code on whole tensors, weights included, which are gathered."""
        mesh, frame = self.mesh, self.frame
        stand_in: Any = object.__new__(type(self))
        vars(stand_in).update({**vars(self), "_parameters": {}})
        for key, lies in self.lies.items():
            bare = Layout(mesh.grid, *[None] * lies.layout.ndim)
            plan = RelayoutPlan(lies.layout, bare, (), frame.outside.dims[0], f"{self.name}.{key}")
            plain = taken(self.held(key), plan, mesh)[tuple(map(slice, lies.real))]  # type: ignore[arg-type]
            vars(stand_in)[key] = plain.flatten(1, 2) if key == UP else plain
        y = super(Experts, stand_in).forward(whole(hidden_states), *choices)
        return split(y, frame, self.layouts.input, self.width, self.name)

    def _moved(self, x: Tensor, source: Layout, target: Layout) -> Tensor:
        return x if source == target else relayout(x, source, target, self.mesh, self.name)


def place_experts(
    module: nn.Module,
    name: str,
    role: ExpertsRole,
    frame: Frame,
    layouts: BlockLayouts,
    width: int,
    expert_axes: Sequence[str],
) -> SplitExperts:
    """Put the experts of a block on the grid.

    Raises:
        LayoutError: axes that are not there, or that do not divide the experts.
    """
    plan = expert_plan(layouts, expert_axes, name)
    (batch,) = plan.up.batch_letters
    plan.up.check_divides({batch: role.count, "m": 0, "k": 0, "n": 0})
    splits = (plan.up.b.num_splits(1), plan.down.b.num_splits(2), plan.up.out.num_splits(2))
    inner = padded_to(role.inner, math.lcm(*splits))
    layer: SplitExperts = adopt(module, SplitExperts, frame, name)
    layer.layouts, layer.plan, layer.width, layer.chunks = layouts, plan, width, 1
    layer.hidden, layer.inner, layer.count = width, inner, role.count
    layer.activation, layer.is_gated, layer.up_name = role.activation, True, UP
    layer.named = (getattr(module, "act_fn", None),)
    layer.expected, layer.last_counts, layer.last = ((), 0), [], ()
    stored = Layout(plan.grid, plan.up.b.dims[0], None, *plan.up.b.dims[1:])
    layer.placed(UP, stored, (role.count, 2, inner, width))
    layer.placed(DOWN, plan.down.b, (role.count, width, inner))
    return layer
