"""Attention whose parts a user's hooks look at: its code runs on tensors with the sizes of the whole.

An attention's code runs on the heads and sequences of one rank, as plain tensors.  A hook on a module inside of it
(a projection, a norm, dropout) would take these for all heads of all sequences.  So a call of an attention whose parts
have hooks, or that got parts since it was split, runs as the dense module does, with its numbers of heads, on split
tensors (`ndtp.split`): hooks get tensors of the whole's sizes, and what they return in their place is taken, split or
whole.  Other calls are as fast as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ndtp.algebra.layout import Layout
from ndtp.compute.constants import inverse_on
from ndtp.errors import LayoutError
from ndtp.models.cut_sequences import row_axes
from ndtp.models.frame import Frame, Passage
from ndtp.models.projections import Projection, products
from ndtp.nn.hooks import OF_A_MODULE, parts_have_hooks, want_whole
from ndtp.split.moving import brought, in_dense_order, moved, section_order
from ndtp.split.spec import Axes, Spec, layout_of
from ndtp.split.tensor import SplitTensor, enter, leave

GLOBAL = [getattr(torch_module, f"_global{kind}") for kind in OF_A_MODULE]


def is_looked_at(module: nn.Module) -> bool:
    """Return whether hooks look at what the parts of an attention take and give, global ones of torch included."""
    return (any(GLOBAL) and any(map(want_whole, GLOBAL))) or parts_have_hooks(module)


@contextmanager
def standing_for(module: nn.Module, dense: Mapping[str, Any]) -> Iterator[nn.Module]:
    """A module with the parts and attributes of another, but for its numbers of heads, which are the dense model's.

    What its code writes to its attributes is the other's as well.
    """
    stand_in = object.__new__(type(module))
    given = {**vars(module), **dense}
    vars(stand_in).update(given)
    try:
        yield stand_in
    finally:
        for name, value in vars(stand_in).items():
            if name not in given or given[name] is not value:
                vars(module)[name] = value


def by_itself(core: Any, member: Projection, x: Tensor) -> Tensor:
    """The result of a projection that other code than the attention's own calls, on a tensor of the whole's sizes."""
    if x.dim() == 1:
        return by_itself(core, member, x.unsqueeze(0))[0]
    x = member.taken(x)
    (y,) = products([member], x)
    return member.as_given(y, x.passage) if member is core.output else with_whole_sizes(core, member, y, x.passage)


def with_whole_sizes(core: Any, member: Projection, y: Tensor, passage: Passage) -> Tensor:
    """A projection's result, of which y [rows, features] is this rank's shard, in the dense order of its features.

    Args:
        passage: of the projection's input.
    """
    order, sections = member.order, ()  # type: Tensor | None, tuple[int, ...]
    if order is not None:
        each = tuple(count * core.head_dim for count in (core.heads, core.kv_heads, core.kv_heads))
        is_split = core.kv_heads % core.inner.num_splits(1) == 0
        if is_split and torch.equal(order, section_order(each, core.inner.num_splits(1))):
            order, sections = None, each
    made = of_shard(core, y, core.inner, (*passage.lead, member.real_out), member.name, sections)
    if order is None:
        return made
    flat = moved(made, [*made.spec.dims[:-1], ()])  # in an order of heads that no layout has
    return enter(leave(flat).index_select(-1, inverse_on(order, y.device)), flat.spec)


def of_shard(
    core: Any, y: Tensor, layout: Layout, sizes: tuple[int, ...], name: str, sections: tuple[int, ...] = ()
) -> SplitTensor:
    """The tensor [batch, .., features] of which y [rows, features] is a rank's shard, with padded rows."""
    lies = _Lying.of(core.frame, layout, sizes)
    if lies.across:
        shard = y.unflatten(0, (-1, lies.across)).transpose(0, 1)
    else:
        shard = y.unflatten(0, (-1, *sizes[1:-1]))
    if not lies.rows:  # padding is cut off where no axes split it
        shard = shard.narrow(lies.dim, 0, sizes[lies.dim])
    spec = Spec(core.context, sizes, lies.layout, lies.padded, sections if lies.layout.dims[-1] else (), name)
    return enter(shard.contiguous().view_as(shard), spec)


def shard_of(core: Any, x: Tensor, layout: Layout) -> Tensor:
    """This rank's shard [rows, features], with padded rows, of a tensor [batch, .., features], split or whole."""
    lies = _Lying.of(core.frame, layout, tuple(x.shape))
    if isinstance(x, SplitTensor) and x.spec.sections:
        x = in_dense_order(x)
    shard = brought(x, core.context, lies.layout.dims, lies.padded, (), core.name)
    more = 0 if lies.rows else lies.size - x.shape[lies.dim]
    if more:
        shard = F.pad(shard, [0, 0] * (x.dim() - 1 - lies.dim) + [0, more])
    shard = shard.transpose(0, 1) if lies.across else shard
    return shard.flatten(0, -2).contiguous()


@dataclass(frozen=True)
class _Lying:
    """The way in which [batch, .., features] lies, whose rows are split as hidden states are.

    Attributes:
        layout, padded: of the tensor.
        rows: the axes that split the dim `dim`, the batch or the tokens, of `size` with padding.
        across: as of `ndtp.models.frame.Passage`.
    """

    layout: Layout
    padded: tuple[int, ...]
    rows: Axes
    dim: int
    size: int
    across: int

    @classmethod
    def of(cls, frame: Frame, layout: Layout, sizes: tuple[int, ...]) -> _Lying:
        """Return it for a layout of [rows, features].

        Raises:
            LayoutError: tokens are split, and are not in one dim.
        """
        rows, across = frame.rows_of(sizes[:-1])
        axes = row_axes(frame, layout)
        if across and len(sizes) != 3:
            raise LayoutError(f"parallelize: attention takes [batch, sequence, features], not {sizes}")
        dim = 1 if across else 0
        size = rows // max(math.prod(sizes[:-1]) // max(sizes[dim], 1), 1)
        dims = [*[()] * (len(sizes) - 1), frame.mesh.grid.nontrivial(layout.dims[1])]
        padded = [*sizes]
        if axes:
            dims[dim], padded[dim] = axes, size
        return cls(layout_of(frame.mesh, dims), tuple(padded), axes, dim, size, across)


def made_alike(arguments: Mapping[str, Any], name: str, is_whole: bool) -> None:
    """Note of the caches among an attention's arguments of which sizes their tensors are.

    Raises:
        LayoutError: they are of others than those of this call.
    """
    for value in arguments.values():
        if type(value) is dict:
            made_alike(value, name, is_whole)
        elif "ache" in type(value).__name__ and hasattr(value, "__dict__"):
            before = vars(value).setdefault("ndtp_is_whole", {}).setdefault(name, is_whole)
            if before != is_whole:
                raise LayoutError(
                    f"parallelize: the cache has keys and values of '{name}' from before hooks were "
                    f"{'put on its parts' if is_whole else 'taken off its parts'}, "
                    f"{'of the heads of one rank' if is_whole else 'with the sizes of the whole'}\n"
                    "  fix: a new cache; hooks and adapters that stay as they are while a cache is in use"
                )
