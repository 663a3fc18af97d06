"""The products of an MLP as one program: the model's own code is read by what it notes of a `Pending`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.compute.traces import own_graph
from ndtp.models.hidden import leave
from ndtp.models.noted import Noted
from ndtp.models.pending import Pending, pending
from ndtp.models.projections import Projection, products
from ndtp.models.seen_weights import has_own_weights
from ndtp.models.waiting import Call
from ndtp.nn.hooks import has_hooks
from ndtp.ops.few_rows import takes_few_rows
from ndtp.ops.products import mlp
from ndtp.runtime.arrival import local_shard
from ndtp.runtime.joint_leaves import made_of
from ndtp.runtime.of_turn import OfTurn
from ndtp.split.copies import state_of


def is_bare(layers: Sequence[nn.Module], inside: Sequence[nn.Module] = ()) -> bool:
    """Return whether nothing but a layer's forward runs when it is called, with the parameters of the layer.

    Args:
        inside: other modules, whose hooks may look at what lies between the layers.
    """
    if any(has_hooks(each) for each in (*layers, *inside)) or any("forward" in each.__dict__ for each in layers):
        return False
    return has_own_weights(layers)


class Notes:
    """The way in which layers of a recognised model wait for what is made of their results; others have one in
    `ndtp.models.observed_schedule`.
    """

    def call_of(self, members: tuple[Projection, ...], x: Tensor, compute: object, **options: object) -> Call:
        return Call(members, members[0].taken(x), compute, x, **options)  # type: ignore[arg-type]

    def noted(self, call: Call, member: Projection, x: Tensor) -> Pending | Noted:
        """Return the result of a layer of a call, before it is computed."""
        return pending(call, member)


@dataclass(eq=False)
class MLPSchedule(Notes):
    """The layers of one MLP, whose products are one program where nothing but an activation stands between them.

    Attributes:
        inside: other modules of the MLP, whose hooks may look at what lies between.
    """

    ups: tuple[Projection, ...]
    down: Projection
    inside: tuple[nn.Module, ...] = ()
    call = OfTurn()
    state = OfTurn()

    def called(self, member: Projection, x: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return None
        return self._led_back(x) if member is self.down else self._ahead(member, x)

    def _ahead(self, member: Projection, x: Tensor) -> Pending | Noted | None:
        """Return the noted result of a projection that leads in; None where it is computed at once."""
        if not self.pays(x) or not is_bare((*self.ups, self.down), self.inside):
            return None
        index, call, now = self.ups.index(member), self.call, state_of(x)
        if call is None or call.given is not x or self.state != now or index in call.asked or not call.is_now:
            call = self.call = self.call_of(self.ups, x, products)
            self.state = now
            self.down.frame.shared[id(self)] = self
        made = self.noted(call, member, x)
        if len(call.asked) == len(self.ups):
            self.call = None
        return made

    def forget(self) -> None:
        self.call = None

    def pays(self, x: Tensor) -> bool:
        """Return whether anything is gained by waiting: of few rows nothing is chunked."""
        return not takes_few_rows(leave(x), (self.ups[0].plan, self.down.plan), self.down.mesh)

    def fits(self, x: Any) -> bool:
        """Return whether a formula is of all rows of the call, in the features that the last projection takes."""
        return x.passage.width == self.down.width and x.rows is None and x.key is not None

    def given(self, y: Tensor, x: Any) -> Tensor:
        return self.down.as_given(y, x.passage)

    def _led_back(self, x: object) -> Tensor | None:
        """Return the last projection's result as part of the one program; None where it takes its inputs by itself."""
        if not isinstance(x, (Pending, Noted)) or x.call.members != self.ups or not x.is_open:
            return None
        call, down, ups, frame = x.call, self.down, self.ups, self.down.frame
        if x.dtype != call.dtype or not self.fits(x):
            return None
        if x.key not in frame.activations:
            frame.activations[x.key] = activation_of(x)
        found, rows = frame.activations[x.key], leave(call.source)
        if found is None:
            return None
        with down.at_work():
            if len({each.needed("weight", rows).dtype for each in (*ups, down)}) > 1:
                return None
        name, leaves = found
        if down.width != down.real_in and ACTIVATIONS[name].forward(torch.zeros(2)).any():
            return None  # whose padding would not stay zero
        if not call.take():
            return None
        with down.at_work():
            (up_weight, up_bias), (weight, bias) = as_one(ups, leaves), down.weight_and_bias()
            plans = ups[0].plan, down.plan
            y = mlp(rows, (up_weight, weight), plans, frame.mesh, name, (up_bias, bias), (ups[0], down))
        return self.given(y, x)


def as_one(ups: Sequence[Projection], leaves: Sequence[tuple[int, int | None]]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the first product: of gate and up with their features in turns, as a gated activation is."""
    if len(leaves) == 1:
        return ups[0].weight_and_bias()
    dim, is_turned = ups[0].features_dim, leaves[0] > leaves[1]
    if len(ups) == 1:  # gate and up in one, in each part of its result one behind the other
        weight, bias = ups[0].weight_and_bias()
        turned = partial(_turned, parts=ups[0].parts, is_turned=is_turned)
        return turned([weight], dim), None if bias is None else turned([bias], 0)
    layers = [ups[index].weight_and_bias() for index, _ in leaves]
    weight = _in_turns([w for w, _ in layers], dim)
    if all(bias is None for _, bias in layers):
        return weight, None
    return weight, _in_turns([b for _, b in layers], 0, weight.new_zeros(weight.shape[dim] // 2))


def _turned(fused: Sequence[Any], dim: int, parts: int, is_turned: bool) -> Tensor:
    """Features of two layers, one behind the other in each part, in turns."""

    def turned(shards: Sequence[Tensor]) -> Tensor:
        both = shards[0].unflatten(dim, (parts, 2, -1)).transpose(dim + 1, dim + 2)
        return (both.flip(dim + 2) if is_turned else both).flatten(dim, dim + 2)

    return made_of(fused, [local_shard(each) for each in fused], turned)


def _in_turns(parameters: Sequence[Any], dim: int, zeros: Tensor | None = None) -> Tensor:
    """Features of several layers in turns; `zeros` where a layer has none."""
    shards: list[Any] = [zeros if each is None else local_shard(each) for each in parameters]
    return made_of(parameters, shards, lambda given: torch.stack(list(given), dim + 1).flatten(dim, dim + 1))


# Numbers that tell activations apart, none of them where one has a kink; far out, what is clamped shows.
_FAR = (-1e6, -1e3, -97.0, -13.0, -1e-3, 2e-3, 11.0, 31.0, 1e3, 1e6)
_AT = torch.cat((torch.linspace(-7.3, 7.1, 40), torch.tensor(_FAR))).double()
_GATES_AT = _AT.flip(0).roll(7) * 1.1


def activation_of(x: Pending | Noted) -> tuple[str, list[tuple[int, int | None]]] | None:
    """Find the activation that a formula computes, by a trial, and its projections; the gate comes first.

    Returns:
        None for one that `ndtp.compute.epilogues` does not know.
    """
    leaves = _leaves(x)
    # A checkpoint, which compares what forward and the forward again save, must not count what is tried once either.
    # A first call in inference mode has no gradients, and what is found in it holds for later calls.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), own_graph():
        given = {leaf: at.clone().requires_grad_() for leaf, at in zip(leaves, (_AT, _GATES_AT), strict=False)}
        if len(given) != len(leaves):
            return None
        try:
            y = x.formula(given)
        except RuntimeError:  # an operand that belongs to inference mode
            return None
        if y.dtype != torch.float64 or not y.requires_grad:
            return None
        slopes = torch.autograd.grad(y.sum(), list(given.values()), allow_unused=True)
    if any(slope is None for slope in slopes):
        return None
    for order in ([*leaves], [*leaves[::-1]])[: len(leaves)]:
        pre = torch.stack([given[leaf].detach() for leaf in order], -1).flatten()
        wanted = torch.stack([slopes[leaves.index(leaf)] for leaf in order], -1).flatten()
        for name, activation in ACTIVATIONS.items():
            if activation.width != len(order):
                continue
            slope = activation.backward(torch.ones_like(_AT), pre)
            if all(torch.allclose(a, b, rtol=1e-8, atol=1e-8)
                   for a, b in ((y.detach(), activation.forward(pre)), (wanted, slope))):  # fmt: skip
                return name, order
    return None


def _leaves(x: Pending | Noted) -> list[tuple[int, int | None]]:
    found: list[tuple[int, int | None]] = []
    waiting = [x]
    while waiting:
        each = waiting.pop(0)
        if each.leaf is not None and each.leaf not in found:
            found.append(each.leaf)
        waiting += [o for o in (*each.operands, *each.kwargs.values()) if isinstance(o, (Pending, Noted))]
    return sorted(found, key=str)
