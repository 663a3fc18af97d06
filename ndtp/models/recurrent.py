"""Recurrent layers of torch on a grid: their weights stay where they lie."""

from __future__ import annotations

from torch import nn


def keep_weights_apart(model: nn.Module) -> None:
    """Let no recurrent layer of torch move its weights into one piece of memory.

    On a GPU `flatten_parameters`, which the layer also calls by itself when its weights are other tensors than before,
    asks where the memory of each weight lies.  Of a weight on a grid this rank has a shard.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _nothing_to_flatten  # type: ignore[method-assign]


def _nothing_to_flatten() -> None:
    """Stand in for `flatten_parameters`: each call has whole weights of its own, which it would move every time."""
