"""Checks that a call of a module runs its forward and nothing else, since a fused block does not call its parts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules import module as torch_module

OF_A_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs with this module's forward or backward, global hooks of torch included."""
    # Written out: this runs for each layer of each call.
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    here = torch_module
    of_all = here._global_forward_hooks or here._global_forward_pre_hooks
    return bool(own or of_all or here._global_backward_hooks or here._global_backward_pre_hooks)


def parts_have_hooks(module: nn.Module) -> bool:
    """Return whether hooks, or a `forward` of its own, look at what a part of this module takes and gives; global hooks
    of torch do not count.
    """
    waiting = [*module._modules.values()]
    while waiting:
        part = waiting.pop()
        if part is None:
            continue
        own = part.__dict__
        hooked = (
            own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
        )
        if "forward" in own or (hooked and any(map(want_whole, (own[kind] for kind in OF_A_MODULE)))):
            return True
        waiting += own["_modules"].values()
    return False


def want_whole(hooks: Mapping[int, object]) -> bool:
    """Return whether a hook is to get the whole's sizes: all but ndtp's own that say that they take shards."""
    return any(not getattr(hook, "takes_shards", False) for hook in hooks.values())


def runs_alone(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a call of `module` runs `kind.forward` and nothing else: no hook, no other forward, no
    subclass.
    """
    return type(module).forward is kind.forward and "forward" not in module.__dict__ and not has_hooks(module)
