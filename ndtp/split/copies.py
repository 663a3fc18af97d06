"""Views that share no memory with their tensor, since dims were gathered for them, and which torch's would be views.

What is written to one comes to the tensor, and what is written to the tensor is seen by it, as in the dense model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ndtp.compute.constants import constant_on
from ndtp.compute.torch_calls import TorchFunction
from ndtp.errors import LayoutError
from ndtp.runtime.versions import version_of as version_of_plain
from ndtp.split.moving import cut, moved, section_order
from ndtp.split.spec import Spec
from ndtp.split.tensor import GATHERED, TABLE, Linked, SplitTensor, enter, leave, rule, split_in


@dataclass(eq=False)
class Tie:
    """The tie between a tensor and what was gathered of it, of which views were handed out in the place of its own.

    A write to either is brought to the other.

    Attributes:
        version: that of `base` which `gathered` shows.
    """

    base: Any
    gathered: Tensor
    version: tuple[int, int]

    def fresh(self) -> None:
        """Bring what was written to `base` since into the views; a collective."""
        if self.base.link is not None:
            self.base.link.fresh()
        now = version_of(self.base)
        if now == self.version:
            return
        again = self.again()
        with torch._C.DisableTorchFunctionSubclass():
            self.gathered.copy_(again)
        self.version = now

    def write(self) -> None:
        """Bring what was written to a view into `base`."""
        changes_others = self.bring_back()
        written(self.base)
        if not changes_others:  # else the views are brought up to date when they are read
            self.version = version_of(self.base)

    def again(self) -> Tensor:
        """Return what `gathered` is to show of `base` now."""
        raise NotImplementedError

    def bring_back(self) -> bool:
        """Write what `gathered` shows into the memory of `base`.  Returns whether more of it has changed thereby."""
        raise NotImplementedError


class Copy(Tie):
    """The link of a split tensor with dims gathered."""

    def again(self) -> Tensor:
        if isinstance(self.gathered, SplitTensor):
            return leave(moved(self.base, self.gathered.spec.dims, self.gathered.spec.padded))
        result: Tensor = TABLE[GATHERED](self.base)
        return result

    def bring_back(self) -> bool:
        base, spec, now = self.base, self.base.spec, self.gathered
        if not isinstance(now, SplitTensor):
            shard = cut(now, spec)
        else:
            if spec.sections and now.spec.dims[-1] != spec.dims[-1]:
                order = constant_on(section_order(spec.sections, spec.layout.num_splits(-1)), now.device)
                now = enter(leave(now).index_select(-1, order), now.spec)
            shard = leave(moved(now, spec.dims, spec.padded))
        with torch._C.DisableTorchFunctionSubclass():
            return copied_into(base, shard, spec)


def copied_into(base: Tensor, shard: Tensor, spec: Spec | None) -> bool:
    """Copy a shard into a tensor.  Returns whether that has one place of memory for several entries, as `expand` makes
    it: such a place gets the entry that has changed.

    Raises:
        LayoutError: other ranks have some of these entries.
    """
    places = enumerate(zip(base.shape, base.stride(), strict=True))
    repeated = [d for d, (size, step) in places if size > 1 and not step]
    if spec is not None and any(spec.dims[d] for d in repeated):
        raise LayoutError(
            f"parallelize: a write to a view of {spec}, which `expand` made and whose repeated entries ranks share\n"
            "  fix: clone() before the write"
        )
    into = base
    for dim in repeated:
        differs = (shard != into) & ~(shard.isnan() & into.isnan())
        shard, into = shard.gather(dim, differs.to(torch.uint8).argmax(dim, keepdim=True)), into.narrow(dim, 0, 1)
    into.copy_(shard)
    return bool(repeated)


def version_of(x: Linked) -> tuple[int, int]:
    """Return how often a tensor was changed in place: as torch counts it, and what it does not count."""
    with torch._C.DisableTorchFunctionSubclass():
        counted = 0 if x.is_inference() else x._version
        return counted, x.writes.get(x.untyped_storage()._cdata, 0)


def state_of(x: Tensor) -> Any:
    """Changes when a tensor, or that of which it is a view, is changed in place."""
    if not isinstance(x, Linked):
        return version_of_plain(x)
    if x.link is not None:
        x.link.fresh()
    return version_of(x)


def written(x: object) -> None:
    """Tell those that a tensor which was changed in place is a view of."""
    if not isinstance(x, Linked):
        return
    with torch._C.DisableTorchFunctionSubclass():
        if not x.requires_grad:  # inference mode, or the `.data` of another
            writes, memory = x.writes, x.untyped_storage()._cdata
            writes[memory] = writes.get(memory, 0) + 1
    if x.link is not None:
        x.link.write()


def standing_for(x: SplitTensor, gathered: Tensor) -> Any:
    """`gathered`, which is x with dims gathered: views of it are in the place of views of x."""
    if gathered is x:
        return x
    base = enter(leave(x), x.spec)  # which stays as it is where x is transposed in place
    base.link, base.strides = x.link, x.strides
    made = Copy(base, gathered, version_of(x))
    if isinstance(gathered, SplitTensor):
        strides, gathered = gathered.strides, enter(leave(gathered), gathered.spec)
        gathered.link, gathered.strides = made, strides
        return gathered
    return made


def as_view(made: Any, of: SplitTensor) -> Any:
    """Views of a tensor: what it stands for, they stand for."""
    if of.link is not None:
        for x in split_in([made]):
            x.link = of.link
    return made


def share_memory(a: Tensor, b: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def in_form(x: SplitTensor, target: Spec, is_view: bool) -> SplitTensor:
    """The shard in another form, which shares memory with x if and only if the dense one does."""
    shard = leave(x)
    made = shard.reshape(target.local)
    shares = share_memory(made, shard)
    if not is_view:
        return enter(made.clone() if shares else made, target)
    if shares:
        result: SplitTensor = as_view(enter(made, target), x)
        return result
    own = standing_for(x, enter(shard.contiguous(), x.spec))
    result = as_view(enter(leave(own).view(target.local), target), own)
    return result


def with_strides_of(made: SplitTensor, dense: Tensor) -> SplitTensor:
    """A result whose dense one has the strides of `dense`."""
    if not dense.is_contiguous():
        made.strides = dense.stride()
    return made


@rule(Tensor.__deepcopy__)
def copied(func: TorchFunction, x: SplitTensor, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a tensor, which lies as that does: a cache of keys that is copied knows what it holds."""
    if x.requires_grad and not x.is_leaf:
        return NotImplemented  # which torch refuses
    if id(x) not in memo:
        memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return memo[id(x)]
