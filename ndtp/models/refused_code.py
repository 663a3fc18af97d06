"""Models that cannot be split, by code or wrappers that take shards for the whole: refused before anything moves."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ndtp.errors import LayoutError
from ndtp.models.adopted import Adopted
from ndtp.models.boundary import BoundaryLinear
from ndtp.nn.sharded import BlockModule, Sharded


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


def refuse_lazy(model: nn.Module) -> None:
    """Refuse parameters and buffers that get their sizes in the first call, as those of `nn.LazyLinear` do.

    Raises:
        LayoutError: names the first one.
    """
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x):
            raise LayoutError(
                f"parallelize: {name!r} is of a lazy layer, and has no size before its first call\n"
                "  fix: call the dense model once, with an input of the right sizes, and then parallelize"
            )


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that another tool has split, or takes for a copy of what other ranks have.

    Raises:
        LayoutError: names the first module or parameter.
    """
    fix = (
        "the model without it: Grid(dp=..) has ranks with rows of their own and sums gradients, as DDP does; scheme "
        "'3d' splits weights over z, as FSDP does"
    )
    sharded = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(sharded, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    kinds += [nn.DataParallel, nn.parallel.DistributedDataParallel]
    for name, module in model.named_modules():
        found = next((kind for kind in kinds if kind and isinstance(module, kind)), None)
        if found is not None:
            which = repr(name) if name else "the model"
            raise LayoutError(f"parallelize: {which} is wrapped by torch's {found.__name__}\n  fix: {fix}")
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and not hasattr(p.device_mesh, "ndtp_grid"):
            raise LayoutError(f"parallelize: {name!r} lies on {p.device_mesh}, of another tool\n  fix: {fix}")


def refuse_layers_of_shards(model: nn.Module) -> None:
    """Refuse layers of `ndtp.nn`: they take this rank's shard, and a model that is split as a whole gives the whole.
    And parts that were split by themselves, whose code and parameters are not the dense ones any more.

    Raises:
        LayoutError: names the first one.
    """
    for name, module in model.named_modules():
        if name and "ndtp_report" in vars(module):
            raise LayoutError(
                f"parallelize: {name!r} is split already, by a parallelize of its own\n"
                f"  fix: one parallelize, of {type(model).__name__} alone; or one of each of its parts instead"
            )
        if isinstance(module, (Sharded, BlockModule)) and not isinstance(module, (Adopted, BoundaryLinear)):
            where, kind = repr(name) if name else "the model", type(module).__name__
            raise LayoutError(
                f"parallelize: {where} is split already: an ndtp.nn.{kind} takes a shard of its input, and the code of "
                "a model that parallelize splits has whole tensors\n  fix: the dense layer in its place, which "
                "parallelize splits (its to_dense() gives one); or no parallelize"
            )
