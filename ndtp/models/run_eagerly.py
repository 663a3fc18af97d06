"""Split models under a compiler: what has hidden states runs as it is, and the program around it is compiled.

A split activation has the sizes of the whole (`ndtp.models.hidden`), its memory those of a part.  A compiler derives
every stride and every buffer from sizes, so it can follow neither such a tensor nor code that looks at one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from ndtp.collectives.torch_patches import in_place
from ndtp.models.adopted import Adopted
from ndtp.models.hidden import Hidden
from ndtp.models.made_classes import made_class
from ndtp.models.pending import Pending
from ndtp.models.replicated import Replicated
from ndtp.runtime.eagerly import WHY_EAGER, backwards_as_they_are, eagerly
from ndtp.split.tensor import SplitTensor
from ndtp.split.whole_views import WholeView


def run_eagerly(model: nn.Module) -> None:
    """Let compilers leave the forward of a split model alone, and those of its parts, which some compile one by one.

    With `fullgraph=True` their error says why.
    """
    backwards_as_they_are()
    known = in_place("torch._dynamo.config.nontraceable_tensor_subclasses")
    known.update((Hidden, Pending, WholeView, SplitTensor))  # where one is an argument
    for module in model.modules():
        theirs: Any = type(module)
        if theirs.forward is nn.Module.forward or getattr(theirs.forward, "_torchdynamo_disable", False):
            continue
        if module is model or any(isinstance(part, (Adopted, Replicated)) for part in module.modules()):
            module.__class__ = _eager(theirs, theirs.forward, module is model)


@cache
def _eager(theirs: Any, forward_of_theirs: Callable[..., object], is_root: bool) -> Any:
    """The class of the modules of a class whose forward compilers leave alone, made once for each forward."""

    @eagerly(WHY_EAGER)  # a third of the time that torch's own takes, whose error graphs without breaks need
    @wraps(forward_of_theirs)
    def forward(*args: object, **kwargs: object) -> object:
        return forward_of_theirs(*args, **kwargs)

    forward = torch.compiler.disable(forward_of_theirs, reason=WHY_EAGER) if is_root else forward
    named = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__}
    return made_class(theirs.__name__, (theirs,), {**named, "forward": forward})


def compiled_parts_run_eagerly(model: nn.Module) -> None:
    """Let submodules that `torch.compile` or their own `compile` has taken run as they are, in copies of them, too."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return
    for module in model.modules():
        module._compiled_call_impl = None
        compiled = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
        if compiled is not None and getattr(compiled, "__func__", None) is type(module).forward:
            del module.forward  # module.forward = torch.compile(module.forward)
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            module.dynamo_ctx = _as_it_is  # type: ignore[assignment]  # of which a copy makes its forward anew
            module._initialize()


def _as_it_is(function: object) -> object:
    """The compiler in the place of torch's own."""
    return function
