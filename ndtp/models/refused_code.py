"""Models that cannot be split, by code or wrappers that take shards for the whole: refused before anything moves."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ndtp.errors import LayoutError
from ndtp.models.adopted import Adopted
from ndtp.models.boundary import BoundaryLinear
from ndtp.nn.sharded import BlockModule, Sharded
from ndtp.runtime.facts import is_strided


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


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse a parameter that learns and another parameter or a buffer that have elements in the same memory.

    The step of one changes the other in the dense model; on the grid each has memory of its own.

    Raises:
        LayoutError: names the first two.
    """
    by_memory: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if type(x) in (nn.Parameter, Tensor, nn.Buffer) and is_strided(x) and not x.is_meta and x.numel():
            begin = int(x.storage_offset()) * x.element_size()
            by_memory.setdefault(x.untyped_storage()._cdata, []).append((begin, begin + _span(x), name, x))
    for shared in by_memory.values():
        shared.sort(key=lambda each: each[0])
        for number, (_, end, first, x) in enumerate(shared):
            for begin, _, second, y in shared[number + 1 :]:
                if begin >= end:
                    break
                if (x.requires_grad or y.requires_grad) and _overlap(x, y):
                    raise LayoutError(
                        f"parallelize: {first!r} {tuple(x.shape)} and {second!r} {tuple(y.shape)} lie in one memory, "
                        "where a step of one changes the other; on a grid each has memory of its own\n"
                        "  fix: one parameter for both, as head.weight = table.weight ties two layers; or where they "
                        "are to be two, memory of its own for one of them, p.data = p.data.clone()"
                    )


def _span(x: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    steps = zip(x.shape, x.stride(), strict=True)
    return (1 + sum((int(size) - 1) * int(step) for size, step in steps)) * x.element_size()


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors whose places lie between each other's have an element in the same place."""
    if any(each.numel() * each.element_size() == _span(each) for each in (x, y)) or x.dtype != y.dtype:
        return True
    # Columns of one matrix, say.
    marks = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool)
    marks.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return bool(marks.as_strided(y.shape, y.stride(), y.storage_offset()).any())


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
