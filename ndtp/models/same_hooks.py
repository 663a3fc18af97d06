"""Hooks on gradients inside of what runs as one program: a rank that has one computes layer by layer, so all must.

The gradient of a layer's result inside of such a program is nowhere to be had.  Where code asks for it, the layers are
computed one after the other, and send in another order than the program does on ranks where nobody asks.
"""

from __future__ import annotations

from torch import Tensor

from ndtp.compute.torch_calls import Arguments, TorchFunction
from ndtp.runtime.points import Point, compare

HOOKING = {Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook}


def compare_hooks(func: TorchFunction, args: Arguments) -> None:
    """Compare, inside of a call that ranks compare, that all of them ask for the gradient of what a layer gives.

    Raises:
        MismatchError: the others are elsewhere.
    """
    if func not in HOOKING:
        return
    layer = args[0].call.members[0]
    mesh = layer.mesh
    conversation = mesh.groups.current_conversation
    if conversation is not None and conversation.speaker is not None:
        compare(mesh, conversation, Point(f"{func.__name__} on what '{layer.name}' gives", None))
