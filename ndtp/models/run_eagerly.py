"""Split models under a compiler: what has hidden states runs as it is, and the program around it is compiled.

A split activation has the sizes of the whole (`ndtp.models.hidden`), its memory those of a part.  A compiler derives
every stride and every buffer from sizes, so it can follow neither such a tensor nor code that looks at one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from ndtp.collectives.torch_patches import in_place
from ndtp.models.adopted import Adopted
from ndtp.models.hidden import Hidden
from ndtp.models.made_classes import made_class
from ndtp.models.pending import Pending
from ndtp.runtime.eagerly import backwards_as_they_are
from ndtp.split.tensor import SplitTensor
from ndtp.split.whole_views import WholeView

WHY = (
    "ndtp: a model that was parallelized as a whole runs eagerly: its hidden states have the sizes of the whole and "
    "the memory of a part, which no graph can hold. fix: leave out fullgraph=True, or build its layers of ndtp.nn, "
    "which compile into one graph"
)


def run_eagerly(model: nn.Module) -> None:
    """Let compilers leave the forward of a split model alone, and those of its layers, which some compile one by one.

    With `fullgraph=True` their error says why.
    """
    backwards_as_they_are()
    known = in_place("torch._dynamo.config.nontraceable_tensor_subclasses")
    known.update((Hidden, Pending, WholeView, SplitTensor))  # where one is an argument
    stacks = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    listed = [layer for stack in stacks for layer in stack.children()]  # a list may have None in it
    layers = [layer for layer in listed if any(isinstance(m, Adopted) for m in layer.modules())]
    for module in {id(each): each for each in (model, *layers)}.values():
        theirs: Any = type(module)
        if not isinstance(module, Adopted):
            module.__class__ = _eager(theirs, theirs.forward)


@cache
def _eager(theirs: Any, forward_of_theirs: Any) -> Any:
    """The class of the modules of a class whose forward compilers leave alone, made once for each forward."""
    forward = torch.compiler.disable(forward_of_theirs, reason=WHY)
    return made_class(theirs.__name__, (theirs,), {"__module__": theirs.__module__, "forward": forward})


def compiled_parts_run_eagerly(model: nn.Module) -> None:
    """Let submodules that `torch.compile` or their own `compile` has taken run as they are, in copies of them, too."""
    for module in model.modules():
        module._compiled_call_impl = None
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            module.dynamo_ctx = _as_it_is  # type: ignore[assignment]  # of which a copy makes its forward anew
            module._initialize()


def _as_it_is(function: Any) -> Any:
    """The compiler in the place of torch's own."""
    return function
