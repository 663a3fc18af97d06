"""Views of gathered tensors: a plain tensor in all but what is written to it, which comes back to the shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndtp.errors import LayoutError
from ndtp.split.copies import Tie, share_memory, version_of
from ndtp.split.gathered_operands import receives
from ndtp.split.hooked_gradients import gradients
from ndtp.split.tensor import FACTS, SHAPE, SIZES, getters, mapped, name_of

# What concerns the very tensor, and no other one of the same memory.
OWN = {
    *FACTS, *SHAPE, *SIZES, *getters("grad", "_grad"), Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
    *[getattr(Tensor, name).__set__ for name in ("grad", "_grad")],
}  # fmt: skip


class WholeView(Tensor):
    """A view of what was gathered of a split tensor, in the place of a view of that tensor.

    What is computed of it is a plain tensor, and a view of it is another `WholeView`.

    Attributes:
        link: ties what was gathered to the split tensor.
    """

    link: Tie

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func in OWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return gradients(func, *args, **kwargs)
        found: dict[int, tuple[WholeView, Tensor, int]] = {}

        def bare(x: WholeView) -> Tensor:
            if id(x) not in found:
                x.link.fresh()
                with torch._C.DisableTorchFunctionSubclass():
                    found[id(x)] = x, x.view_as(x), x._version
            return found[id(x)][1]

        result = func(*mapped(args, bare, cls), **mapped(kwargs, bare, cls))
        links: list[Tie] = []
        is_received = receives(func, result)
        for x, plain, version in found.values():
            if (is_received or plain._version != version) and x.link not in links:
                links.append(x.link)
        for link in links:
            if version_of(link.base) != link.version:  # another one of these was written to
                sizes = [tuple(x.shape) for x, _, _ in found.values()]
                raise LayoutError(
                    f"parallelize: {name_of(func)} writes to several views of one tensor, {sizes} among them, which "
                    "was gathered for each\n  fix: write to one after the other"
                )
            link.write()
        return _entered(result, [(x, plain) for x, plain, _ in found.values()])


def entered(view: Tensor, link: Tie) -> WholeView:
    """A view of a gathered tensor, which nobody else has, as one that is tied to the split tensor."""
    view.__class__ = WholeView
    view.link = link  # type: ignore[attr-defined]
    return view  # type: ignore[return-value]


def _entered(result: Any, given: list[tuple[WholeView, Tensor]]) -> Any:
    if isinstance(result, (list, tuple)) and any(isinstance(x, Tensor) for x in result):
        made = [_entered(x, given) for x in result]
        return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
    if type(result) is not Tensor or result.layout is not torch.strided:
        return result
    for x, plain in given:
        if result is plain:
            return x
        if share_memory(result, plain):
            return entered(result, x.link)
    return result
