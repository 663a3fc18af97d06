"""Operations on lists of DTensors (`torch._foreach_*_`, fused optimizers): they count as changes of each, and lists may
have plain tensors as well.

torch counts a DTensor's changes in `_version`, as any tensor's, but for these: nobody would see that an optimizer's
foreach form, or an EMA by `torch._foreach_lerp_`, has changed a weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from ndtp.collectives.torch_patches import in_place
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction

_LOCK = threading.RLock()


@cache
def count_list_operations() -> None:
    """Patch, once a process, DTensor's dispatcher to call `_counted` for operations for which it has no handler yet.

    Raises:
        RuntimeError: a torch whose dispatcher takes no handlers.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[object, Callable[..., object]]
    try:
        handlers = in_place("torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers")
    except AttributeError:
        raise RuntimeError(
            f"DTensor of torch {torch.__version__} takes no handlers of operations, without which changes by foreach "
            "and fused optimizers go unnoticed\n  fix: torch 2.11 to 2.13"
        ) from None

    def counted(operation: Any, args: Arguments, kwargs: Keywords) -> Any:
        with _LOCK:
            del handlers[operation]  # the call below is DTensor's own
            try:
                result = operation(*args, **kwargs)
            finally:
                handlers[operation] = counted
        changed = [x for x in args[0] if isinstance(x, DTensor) and not x.is_inference()]
        if changed:
            torch.autograd.graph.increment_version(changed)
        return result

    for name in dir(torch.ops.aten):
        if name.startswith(("_foreach_", "_fused_")) and name.endswith("_"):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                handlers.setdefault(getattr(packet, overload), counted)


def groups_of(args: Arguments) -> list[list[int]]:
    """The places in the lists of an operation on many, in groups in which the same operands are on a grid; none where
    all lists are of one kind.
    """
    from torch.distributed.tensor import DTensor

    groups: dict[Any, list[int]] = {}
    if not isinstance(args[0], (list, tuple)):
        return []
    lists = [x for x in args if isinstance(x, (list, tuple)) and len(x) == len(args[0])]
    if any(len({*map(type, x)}) > 1 for x in lists):
        for i, operands in enumerate(zip(*lists, strict=True)):
            groups.setdefault(tuple(isinstance(x, DTensor) for x in operands), []).append(i)
    return [*groups.values()]


def operands_of_each(args: Arguments, kwargs: Keywords) -> Iterator[tuple[object, ...]]:
    """Yield, for each place in the lists of an operation on many, the entries of all lists there."""
    if isinstance(args[0], (list, tuple)):
        count = len(args[0])
        lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and len(x) == count]
        yield from zip(*lists, strict=True)


def by_groups(func: TorchFunction, args: Arguments, kwargs: Keywords, groups: Sequence[Sequence[int]]) -> object:
    """Run an operation on many once for each group of places, with the entries of the lists at these."""
    count = len(args[0])
    made: dict[int, Any] = {}
    for places in groups:

        def of_group(x: object, places: Sequence[int] = places) -> object:
            return [x[i] for i in places] if isinstance(x, (list, tuple)) and len(x) == count else x

        result = func(*map(of_group, args), **{key: of_group(x) for key, x in kwargs.items()})
        made.update(zip(places, result or (), strict=False))
    return [made[i] for i in range(count)] if made else None
