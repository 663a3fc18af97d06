"""Code that cannot be split, since it would see shards and take them for the whole: refused before anything moves."""

from __future__ import annotations

import torch
from torch import nn

from ndtp.errors import LayoutError


class TransformedError(LayoutError):
    """The model's code multiplies under a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__(
            "parallelize: the model's own code multiplies under a transform of torch.func (vmap, grad, ..), which "
            "looks past the shards of a split model\n  fix: a loop in the place of vmap; torch.autograd.grad with "
            "create_graph=True in the place of torch.func.grad; or the dense model"
        )


def refuse_scripts(model: nn.Module) -> None:
    """Refuse parts whose code torch does not run in Python: it asks no split tensor what to do, and takes it for whole.

    Raises:
        LayoutError: names the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise LayoutError(
                f"parallelize: {repr(name) if name else 'the model'} is a script of TorchScript, whose code would see "
                "shards and take them for the whole\n  fix: the module of which it was made"
            )
