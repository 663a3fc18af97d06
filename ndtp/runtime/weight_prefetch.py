"""Gather the next product's weight while this one computes.

The order is the one in which weights were really used: learned from the first forward, checked at every use.  A chain
ends where a weight comes again, so nothing is gathered across an optimizer step.  A weight that was changed since, or
that did not come, is gathered anew, and not gathered ahead again.  One gather is in flight at a time.

A gather crosses no edge of a CUDA graph: while one is captured nothing is gathered ahead, nor taken that was,
unless the whole step is captured (`ndtp.capture`); then what is left at the end of the step is waited for there.

Which weights live is up to the garbage collector, and may differ between ranks: so a weight that is gone takes part in
its gather with zeros, for the peers where it is not, and no product takes it.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ndtp.collectives.streams import is_capturing
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.moves import Move, Way
from ndtp.runtime.region import Region, may_start_ahead, region_under_way
from ndtp.runtime.versions import version_of


class _Weight:
    """The facts about a weight that suffice to take part in its gather even when the weight is gone.

    Attributes:
        following: the weight that came after it, if one did.
        is_followed: whether to rely on that.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self.following: _Weight | None = None
        self.is_followed = True

    def note(self, weight: Tensor, way: Way) -> None:
        self.way, self._form = way, _form(weight)

    def tensor(self) -> Tensor | None:
        """The weight, if it lives and is what it was when it was used last."""
        owner = self._owner()
        weight = owner if owner is None or isinstance(owner, Tensor) else owner._parameters.get("weight")
        return None if weight is None or _form(weight) != self._form else weight

    @property
    def device_type(self) -> str:
        return str(self._form[2].type)

    def nothing(self) -> Tensor:
        shape, dtype, device = self._form
        return torch.zeros(shape, dtype=dtype, device=device)


class _Ahead(NamedTuple):
    """A gather that was started for a weight before its product."""

    known: _Weight
    after: _Weight
    weight: Tensor | None
    version: tuple[int, ...]
    move: Move
    region: Region | None


class WeightPrefetch:
    """The order of a `ProcessGrid`'s weights in one phase, by which their gathers start ahead.

    Args:
        is_forward: whether it is forward, which may run again while backward does.
    """

    def __init__(self, is_forward: bool) -> None:
        self._is_forward = is_forward
        self._known: Any = WeakIdKeyDictionary()  # owner of a weight -> _Weight
        self._chain: set[_Weight] = set()  # since the chain began
        self._last: _Weight | None = None
        self._ahead: _Ahead | None = None

    def for_part(self) -> WeightPrefetch:
        """Return the prefetch of one of several parts of a batch that run in turns: the order is shared, each part
        gathers its own.
        """
        own = WeightPrefetch(self._is_forward)
        own._known = self._known
        return own

    def take(self, weight: Tensor, owner: object, way: Way) -> Move | None:
        """The gather of `weight` if it is under way; called once a product that gathers B, in order of execution."""
        if self._is_forward and torch._C._current_autograd_node() is not None:
            # A checkpointed forward again, in another order.
            return None
        known = self._known.get(owner)
        is_new = known is None
        if known is None:
            known = self._known[owner] = _Weight(owner)
        known.note(weight, way)
        ahead = self._taken(weight.device.type)
        if known in self._chain:
            self._chain.clear()
        elif is_new and (last := self._last) is not None and last.following is None:  # an old one: of another step
            last.following = known
        self._chain.add(known)
        self._last = known
        if ahead is None:
            return None
        if ahead.weight is weight and ahead.version == version_of(weight) and ahead.move.way.is_like(way):
            return ahead.move
        ahead.move.wait()
        ahead.after.is_followed = False
        return None

    def _taken(self, device_type: str) -> _Ahead | None:
        """Take what is under way, unless it was started on the other side of a capture's edge."""
        ahead, region = self._ahead, region_under_way()
        if ahead is None or (is_capturing(device_type) and (region is None or ahead.region is not region)):
            return None
        self._ahead = None
        return ahead

    def settle(self) -> None:
        """Wait for what is under way, which nobody takes then."""
        ahead, self._ahead = self._ahead, None
        self._chain.clear()
        if ahead is not None:
            ahead.move.wait()

    def start(self, owner: Any) -> None:
        """Start the gather of the weight that follows the one of `owner`."""
        known = self._known.get(owner)
        if known is None or not known.is_followed or self._ahead is not None:
            return
        following = known.following
        if following is None or following in self._chain:
            return
        if not may_start_ahead(following.device_type):
            return
        region = region_under_way()
        if region is not None:
            region.touch(self)
        weight = following.tensor()
        shard = following.nothing() if weight is None else _local(weight).detach()
        version = () if weight is None else version_of(weight)
        # What is gathered under inference mode may be used outside of it, where backward could not keep it.
        with torch.inference_mode(False):
            move = following.way.start(shard, ahead=True)
        self._ahead = _Ahead(following, known, weight, version, move, region)


def owner_of(weight: Tensor, layer: nn.Module | None) -> Tensor | nn.Module | None:
    """Return the key by which the order of weights is known: a parameter's layer, or a plain tensor itself, or None.

    Not a DTensor, which `nn.Module.to` swaps only if no weak reference to it is there.
    """
    if not weight.is_leaf:
        return None
    if layer is not None and layer._parameters.get("weight") is weight:
        return layer
    return weight if is_plain(weight) else None


def _local(weight: Tensor) -> Tensor:
    return getattr(weight, "_local_tensor", weight)


def _form(weight: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    local = _local(weight)
    return local.shape, local.dtype, local.device
