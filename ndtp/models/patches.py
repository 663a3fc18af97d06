"""Patches of images on a grid, and the hidden states that are parameters: class tokens and positions.

The convolution that makes patches is a product over each of them, and its channels are the features of hidden states:
a rank takes the images and the features that it has.

    pixels  [batch, ..]            whole on every rank, of which it takes its images
    weight  [K_xyz, C, h, w]       features over everything, as an embedding's table
    states  H[M_zy, K_x]           AG_zy(weight) on the way, RS_zy of its gradient, late

A parameter [1, .., features] that a model adds to hidden states, or puts before them, lies as a table, too, and is read
as hidden states that are the same for all sequences: each rank has all of its rows, for its own features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.models.adopted import Adopted, adopt
from ndtp.models.between import DROPOUTS, FACTS, KNOWN, SIZES
from ndtp.models.frame import Frame, Passage
from ndtp.models.hidden import Hidden, enter, whole
from ndtp.models.other_layers import NAMES, reads
from ndtp.models.signatures import input_by_name
from ndtp.ops.moving import taken
from ndtp.ops.reductions import used_over

if TYPE_CHECKING:
    from ndtp.models.placing import Placing

VIEWS = {
    Tensor.flatten, torch.flatten, Tensor.reshape, torch.reshape, Tensor.view, Tensor.transpose, torch.transpose,
    Tensor.swapaxes, torch.swapaxes, Tensor.permute, torch.permute, Tensor.movedim, torch.movedim,
}  # fmt: skip
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Patches(Tensor):
    """Hidden states as a convolution gives them, [batch, features, ..]; turned, they are hidden states."""

    states: Hidden

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if not isinstance(args[0], Patches):
            return func(*map(_channels_first, args), **{name: _channels_first(x) for name, x in kwargs.items()})
        states = args[0].states
        if func in FACTS:
            return func(states, *args[1:], **kwargs)
        first = torch.empty(states.passage.shape, device="meta").movedim(-1, 1).contiguous()
        if func in SIZES:
            return func(first, *args[1:], **kwargs)
        alone = not any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values()))
        if alone and func in KNOWN | DROPOUTS:
            return patches(func(states, *args[1:], **kwargs))
        if alone and func in VIEWS:
            made = func(first, *args[1:], **kwargs)
            if (made.shape, made.stride()) == (first.movedim(1, -1).shape, first.movedim(1, -1).stride()):
                return states
            if made.shape[:2] == first.shape[:2] and made.is_contiguous():
                turned: Any = states.reshape(made.shape[0], *made.shape[2:], made.shape[1])
                return patches(turned)
        return func(*map(_channels_first, args), **{name: _channels_first(x) for name, x in kwargs.items()})


def patches(states: Hidden) -> Tensor:
    """Hidden states [batch, .., features] as [batch, features, ..]."""
    x = torch.empty((), dtype=states.dtype, device=states.device)
    x.__class__ = Patches
    x.states = states  # type: ignore[attr-defined]
    return x


def _channels_first(x: object) -> object:
    """Whole, where it is split."""
    if not isinstance(x, Patches):
        return x
    x.states.passage.frame.note("an operation on patches", x.states.passage)
    return whole(x.states).movedim(-1, 1)


class SplitPatches(Adopted):
    """A convolution whose patches do not overlap.

    Attributes:
        layout: of the hidden states that it gives.
        width: their features with padding.
    """

    layout: Layout
    width: int

    def forward(self, x: Any = None, **named: Any) -> Tensor:
        if named:
            x = input_by_name(self, x, named)
        conv: Any = self
        x = whole(x)
        frame, layout, mesh = self.frame, self.layout, self.mesh
        batch, count = x.shape[0], frame.padded(x.shape[0])
        inner = layout.dims[0][len(frame.outside.dims[0]) :]
        x = used_over(x, Layout(mesh.grid, *[None] * x.dim()), (*inner, *layout.dims[1]), mesh, self.name)
        here = Passage(frame, layout, (batch,), count, 1, 1).rows_here
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, count - batch))[here.start : here.stop]
        bias = self.own("bias", x)
        weight = taken(self.needed("weight", x), self._plan("weight"), mesh)
        y = conv._conv_forward(x, weight, None if bias is None else taken(bias, self._plan("bias"), mesh))
        rows = y.flatten(2).transpose(1, 2).flatten(0, 1).contiguous()
        lead = (batch, *y.shape[2:])
        passage = Passage(
            frame, layout, lead, count * math.prod(lead[1:]), conv.out_channels, self.width, came_from=self.name
        )
        return patches(enter(rows.view_as(rows), passage))

    def _plan(self, key: str) -> RelayoutPlan:
        stored = self.lies[key].layout
        return way_of_features(stored, 0, self.layout, f"{self.name}.{key}")


def way_of_features(stored: Layout, dim: int, layout: Layout, name: str) -> RelayoutPlan:
    """Return the relayout of a parameter whose `dim` is features, for a rank that uses it for its rows as in
    `layout`.
    """
    dims: list[tuple[str, ...]] = [()] * stored.ndim
    dims[dim] = layout.dims[1]
    return RelayoutPlan(stored, Layout(stored.grid, *dims), (), stored.grid.nontrivial(layout.dims[0]), name, "weights")


@dataclass(frozen=True)
class SameForAll:
    """A parameter that is hidden states, the same for all sequences; see `ndtp.models.replicated.OfHeads`.

    Attributes:
        stored, used: how it lies, and what of it a rank takes.
        shape: with padding.
    """

    frame: Frame
    stored: Layout
    used: Layout
    shape: tuple[int, ...]
    features: int
    name: str

    def of(self, x: Tensor) -> Tensor:
        frame, lead = self.frame, self.shape[:-1]
        layout = Layout(self.used.grid, frame.outside.dims[0], self.used.dims[-1])
        passage = Passage(
            frame, layout, lead, math.prod(lead), self.features, self.shape[-1], came_from=self.name
        )  # fmt: skip
        rows = x.flatten(0, -2)
        return enter(rows.view_as(rows), passage)


def states_of(split: Placing, module: nn.Module, name: str) -> Mapping[str, SameForAll]:
    """The parameters of a module that are hidden states."""
    found: dict[str, SameForAll] = {}
    if type(module).__module__.startswith("torch."):
        return found
    for key, p in module._parameters.items():
        if p is None or p.dim() < 3 or p.shape[0] != 1 or p.shape[-1] != split.hidden:
            continue
        bare: list[tuple[str, ...]] = [()] * (p.dim() - 1)
        stored, used = (
            Layout(split.mesh.grid, *bare, axes) for axes in (split.all_features.dims[1], split.layouts.input.dims[1])
        )
        shape = (*p.shape[:-1], split.width)
        found[key] = SameForAll(split.frame, stored, used, shape, split.hidden, f"{name}.{key}")
        split.replaced[f"{name}.{key}"] = f"[{', '.join(map(str, p.shape[:-1]))}, K_{''.join(stored.dims[-1])}]"
    return found


def place_patches(split: Placing, modules: Mapping[str, Any]) -> None:
    """Put the convolutions that make patches of hidden size on the grid."""
    for name, module in modules.items():
        if type(module) not in CONVOLUTIONS or module.out_channels != split.hidden or module.groups != 1:
            continue
        has_gaps = module.stride != module.kernel_size or any(each != 1 for each in module.dilation)
        parent = modules.get(name.rpartition(".")[0])
        if has_gaps or any(module._reversed_padding_repeated_twice) or split.is_kept(name):
            continue
        if parent is not None and reads(parent, *NAMES):
            split.kept[name] = f"the code of {type(parent).__name__} may read its weight"
            continue
        layer: SplitPatches = adopt(module, SplitPatches, split.frame, name)
        layer.layout, layer.width = split.layouts.input, split.width
        axes = split.all_features.dims[1]
        weight: Any = layer._parameters["weight"]
        shape = (split.width, *weight.shape[1:])
        layer.placed("weight", Layout(split.mesh.grid, axes, *[None] * (len(shape) - 1)), shape)
        layer.placed("bias", Layout(split.mesh.grid, axes), shape[:1], (split.hidden,))
        split.replaced[name] = f"patches [K_{''.join(axes)}, {' x '.join(map(str, shape[1:]))}]"
