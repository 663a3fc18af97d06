"""`CommMeter`: what a program really sends, read off torch's own dispatcher.

The meter sees every c10d and functional collective below it, of ndtp or of any torch program (DTensor, DDP, FSDP,
hand-written), with the tensors that went in: it is independent of what a plan predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from ndtp.algebra.steps import received
from ndtp.algebra.volume import Traffic, Volume
from ndtp.collectives.labels import ASIDE, LABEL, Label
from ndtp.dtypes import name_of

# By the names of ndtp's own ops: what they do.  Each op registers itself.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


class CommMeter(TorchDispatchMode):
    """Count the bytes that this rank receives, per phase, collective and axis.

        with ndtp.CommMeter() as meter:
            loss(model(x)).backward()
        meter.volume.total, meter.volume.by("axes")

    ndtp's own collectives carry their axis and phase ("forward", "dgrad", "wgrad"), and a reduce-scatter that a backend
    builds from an all-to-all counts as the reduce-scatter that it is.  Others are named by the description of their
    process group (a mesh dim's name) and are "forward" or "backward".  Bytes are those of ring or pairwise algorithms:
    (p-1)/p of the larger side, twice that for an all-reduce, the whole tensor for a broadcast or receive.

    A weight that is gathered ahead counts where the product comes that it is for, not where its gather was started:
    what stands around one of several blocks counts what that block needs.  Until then its bytes are in `ahead`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._traffic: list[Traffic] = []
        self._seen: set[Label] = set()
        self._ahead: list[tuple[Label, Traffic]] = []

    @property
    def volume(self) -> Volume:
        """Return the bytes received so far."""
        return Volume.of(self._traffic)

    @property
    def ahead(self) -> Volume:
        """Return the bytes received so far for products that have not come yet."""
        return Volume.of(traffic for label, traffic in self._ahead if label.ahead is not None)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: its collectives come by when it runs.  torch would run it eagerly otherwise."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ndtp":
            # What an op does inside is hidden from the mode that was handed the op: so run it here, watched.
            with self:
                return IMPLEMENTATIONS[func.name()](*args, **(kwargs or {}))
        if func.namespace in RULES:
            self._count(RULES[func.namespace].get(func.__name__.split(".")[0]), args)
        elif any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            # A wrapper (DTensor) unfolds into plain operations, which come back here one by one.  Not so a FakeTensor,
            # by which DTensor propagates shapes: nobody would run it.
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def _count(self, rule: MeterRule | None, args: Sequence[Any]) -> None:
        if rule is None or LABEL.get() is ASIDE:  # a wait or a barrier; what is no traffic of tensors
            return
        group = _group_of(args)
        ranks = group.size()
        kind, amount = rule(args, ranks, group.rank())
        label = LABEL.get() or _label_on(args)
        if label is None:
            phase = "forward" if torch._C._current_autograd_node() is None else "backward"
            label = Label((), phase, kind, (_axis_name(group),))
        self._add(label, amount, _dtype(args))

    def _add(self, label: Label, amount: int, dtype: torch.dtype | None) -> None:
        first = label not in self._seen and not label.follows
        self._seen.add(label)
        traffic = _counted(label, amount, dtype, int(first))
        if label.ahead is None:
            self._traffic.append(traffic)
        else:
            self._ahead.append((label, traffic))

    def _arrive(self, label: Label, amount: int) -> None:
        if label in self._seen:
            self._traffic += [traffic for own, traffic in self._ahead if own is label]
            self._ahead = [entry for entry in self._ahead if entry[0] is not label]
        else:
            self._traffic.append(_counted(label, amount, None, 1))


def _counted(label: Label, amount: int, dtype: torch.dtype | None, calls: int) -> Traffic:
    """Traffic as the wire has it: what is sent in another form is bytes, or numbers of that form."""
    elements = amount // dtype.itemsize if dtype is not None else 0
    name = name_of(dtype) if dtype is not None else ""
    return Traffic(*(label.phase, label.collective, label.axes, amount, elements), " ".join(label.op), name, calls)


def received_directly(num_bytes: int) -> None:
    """Count what a collective receives that torch's dispatcher does not see: copies out of the memory of peers."""
    label = LABEL.get()
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, CommMeter) and label is not None:
            mode._add(label, num_bytes, None)


def arrived(label: Label) -> None:
    """Count a collective that was started ahead, where it is waited for."""
    amount, label.ahead = label.ahead, None
    if amount is not None:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, CommMeter):
                mode._arrive(label, amount)


def _label_on(args: Sequence[Any]) -> Label | None:
    """Return the label of a message that others start, such as torch's schedules of pipelines, from its buffer."""
    first = args[0][0] if args and isinstance(args[0], (list, tuple)) and args[0] else None
    return getattr(first, "ndtp_label", None)


def _axis_name(group: Any) -> str:
    return (group.group_desc or "world").removeprefix("mesh_").replace("default_pg", "world")


def _group_of(args: Sequence[Any]) -> Any:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, dist.ProcessGroup):
            return arg
    # Functional collectives name their group by a string, behind the name of the reduction where there is one.
    from torch.distributed.distributed_c10d import _resolve_process_group

    name: Any = next(arg for arg in reversed(args) if isinstance(arg, str))
    return _resolve_process_group(name)


def _dtype(args: Any) -> torch.dtype | None:
    """Return the dtype of the first tensor."""
    for each in args:
        if isinstance(each, Tensor):
            return each.dtype
        if isinstance(each, (list, tuple)) and (found := _dtype(each)) is not None:
            return found
    return None


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor, or of nested lists of them."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def _reduced(tensors: Any, ranks: int) -> int:
    """An all-reduce cuts elements, not bytes, into blocks."""
    if isinstance(tensors, Tensor):
        return received("all_reduce", tensors.numel(), ranks) * tensors.element_size()
    return sum(_reduced(tensor, ranks) for tensor in tensors)


MeterRule = Callable[[Sequence[Any], int, int], tuple[str, int]]


def _gather(argument: int) -> MeterRule:
    return lambda args, ranks, rank: ("all_gather", _bytes(args[argument]) * (ranks - 1))


def _scatter(argument: int) -> MeterRule:
    return lambda args, ranks, rank: ("reduce_scatter", _bytes(args[argument]) // ranks * (ranks - 1))


def _reduce(args: Sequence[Any], ranks: int, rank: int) -> tuple[str, int]:
    return "all_reduce", _reduced(args[0], ranks)


def _exchange(output: Tensor, output_splits: Sequence[int], ranks: int, rank: int) -> tuple[str, int]:
    rows = output.shape[0] if output.dim() else 0
    own = output_splits[rank] if len(output_splits) else rows // ranks
    return "all_to_all", _bytes(output) // max(rows, 1) * (rows - own)


def _exchange_functional(args: Sequence[Any], ranks: int, rank: int) -> tuple[str, int]:
    tensor, splits = args[0], args[1]
    rows = sum(splits) if len(splits) else tensor.shape[0]
    own = splits[rank] if len(splits) else rows // ranks
    return "all_to_all", _bytes(tensor) // max(tensor.shape[0], 1) * (rows - own)


def _one_way(kind: str, receives: Callable[[Sequence[Any], int], bool]) -> MeterRule:
    return lambda args, ranks, rank: (kind, _bytes(args[0]) if receives(args, rank) else 0)


def _rooted(kind: str, root_argument: int) -> MeterRule:
    return _one_way(kind, lambda args, rank: rank != args[root_argument])


# c10d ops take results first, then inputs; functional ones take inputs and return results.
C10D: dict[str, MeterRule] = {
    "_allgather_base_": _gather(1),
    "allgather_": _gather(1),
    "allgather_coalesced_": _gather(1),
    "allgather_into_tensor_coalesced_": _gather(1),
    "_reduce_scatter_base_": _scatter(1),
    "reduce_scatter_": _scatter(1),
    "reduce_scatter_tensor_coalesced_": _scatter(1),
    "allreduce_": _reduce,
    "allreduce_coalesced_": _reduce,
    "alltoall_base_": lambda args, ranks, rank: _exchange(args[0], args[3], ranks, rank),
    "alltoall_": lambda args, ranks, rank: ("all_to_all", _bytes(args[0]) - _bytes(args[0][rank])),
    "broadcast_": _rooted("broadcast", 2),
    "scatter_": _rooted("scatter", 3),
    "gather_": lambda args, ranks, rank: ("gather", _bytes(args[1]) * (ranks - 1) if rank == args[3] else 0),
    "reduce_": _one_way("reduce", lambda args, rank: rank == args[3]),
    "recv_": _one_way("receive", lambda args, rank: True),
    "recv_any_source_": _one_way("receive", lambda args, rank: True),
}

FUNCTIONAL: dict[str, MeterRule] = {
    "all_gather_into_tensor": _gather(0),
    "all_gather_into_tensor_out": _gather(0),
    "all_gather_into_tensor_coalesced": _gather(0),
    "reduce_scatter_tensor": _scatter(0),
    "reduce_scatter_tensor_out": _scatter(0),
    "reduce_scatter_tensor_coalesced": _scatter(0),
    "all_reduce": _reduce,
    "all_reduce_": _reduce,
    "all_reduce_coalesced": _reduce,
    "all_reduce_coalesced_": _reduce,
    "all_to_all_single": _exchange_functional,
    "broadcast": _rooted("broadcast", 1),
    "broadcast_": _rooted("broadcast", 1),
    "irecv": _one_way("receive", lambda args, rank: True),
}

# DTensor's Shard(i) -> Shard(j), on accelerators: its all-to-all runs below the dispatcher.
DTENSOR: dict[str, MeterRule] = {
    "shard_dim_alltoall": lambda args, ranks, rank: ("all_to_all", _bytes(args[0]) // ranks * (ranks - 1)),
}

RULES = {"c10d": C10D, "_c10d_functional": FUNCTIONAL, "_dtensor": DTENSOR}
