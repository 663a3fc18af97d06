"""Other memory for a parameter of the grid: `p.data = x`, as trainers put an average in the place of weights and back.

Who has got the memory of before keeps its numbers, as torch has it.  What stands for the parameter in a forward that
runs is the parameter itself in the dense model, and moves with it.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ndtp.errors import LayoutError

_FEW = 16  # stand-ins, beyond which those that are gone are forgotten


class Memories:
    """The memories that a parameter of the grid has had since it was first asked.

    One that comes back has its number again.  An address does not tell: it may be that of two, one after the other.

    Attributes:
        changes: how often any parameter was given another one.
        number: of the memory that the parameter has.
        _version: how often it was given another one; under the name by which `Versions` asks.
        stand_ins: what stands for it in forwards that run.
    """

    changes = 0
    __slots__ = ("_known", "_version", "number", "stand_ins")

    def __init__(self, first: Tensor) -> None:
        self._version = self.number = 0
        self._known = [(StorageWeakRef(first.untyped_storage()), 0)]
        self.stand_ins: list[ref[Tensor]] = []

    def now_in(self, local: Tensor) -> None:
        """Note that the parameter lies in the memory of a tensor from now on."""
        Memories.changes += 1
        self._version += 1
        self._known = [(known, number) for known, number in self._known if not known.expired()]
        there = local.untyped_storage()
        self.number = next((n for known, n in self._known if known.cdata == there._cdata), self._version)
        if self.number == self._version:
            self._known.append((StorageWeakRef(there), self.number))


def memories_of(x: Any) -> Any:
    """Return the memories of a parameter of the grid; any other tensor, such as one of a dry run, as it is."""
    if not hasattr(x, "_dtensor"):
        return x
    if x.ndtp_memories is None:
        x.ndtp_memories = Memories(x._dtensor._local_tensor)
    return x.ndtp_memories


def stands_for(x: Any, parameter: Tensor) -> None:
    """Let a split tensor stand for a parameter, in whose memory it lies."""
    x.stands_for = parameter
    memories = memories_of(parameter)
    if isinstance(memories, Memories):
        if len(memories.stand_ins) >= _FEW:
            memories.stand_ins = [each for each in memories.stand_ins if each() is not None]
        memories.stand_ins.append(ref(x))


def given_memory(parameter: Any, other: Tensor) -> None:
    """Give a parameter of the grid, and what stands for it, the memory of another tensor that lies as its shard; a copy
    of one whose numbers are in another order.
    """
    own, memories = parameter._dtensor._local_tensor, memories_of(parameter)
    other = other if other.stride() == own.stride() else torch.empty_like(own).copy_(other)
    there = own.untyped_storage()._cdata
    with torch._C.DisableTorchFunctionSubclass():
        for x in [x for each in memories.stand_ins if (x := each()) is not None]:
            if x.untyped_storage()._cdata == there:
                at = x.storage_offset() - own.storage_offset() + other.storage_offset()
                x.data = other.as_strided(x.shape, x.stride(), at)
        own.data = other
    memories.now_in(other)


# Dense tensors of which parameters have taken their parts, and how often they had been written to then.
_COPIED: list[tuple[ref[object], ref[Tensor], int]] = []


def note_given(parameter: Tensor, value: Tensor, is_copied: bool) -> None:
    """Note what a parameter is given by `.data =`.

    Args:
        is_copied: it is a dense tensor, whose memory the parameter would share in a dense model.

    Raises:
        LayoutError: it has other sizes.
    """
    if (given := tuple(value.shape)) != tuple(parameter.shape):
        raise LayoutError(
            f"ndtp: .data = of {_named(parameter)}, which is split over ranks, got a tensor {given}\n"
            "  fix: a dense tensor of its shape, of which each rank takes its part; or make the model anew"
        )
    _COPIED[:] = [each for each in _COPIED if each[0]() is not parameter and each[1]() is not None]
    if is_copied and not value.is_inference():
        memory = value if value._base is None else value._base  # a view may go, what it is a view of counts writes, too
        _COPIED.append((ref(parameter), ref(memory), memory._version))


def _named(parameter: Any) -> str:
    return (f"'{parameter.ndtp_name}'" if parameter.ndtp_name else "a parameter") + f" {tuple(parameter.shape)}"


def refuse_later_writes() -> None:
    """Refuse a write to a dense tensor behind `p.data = dense`: the parameter does not see it.

    Raises:
        LayoutError: names the parameter.
    """
    for parameter, dense, version in _COPIED:
        p, x = parameter(), dense()
        if p is not None and x is not None and x._version != version:
            raise LayoutError(
                f"ndtp: .data of {_named(p)} was given a tensor that was written to since; in a dense model "
                "the two share memory, here each rank has taken its part\n  fix: write to the parameter, or give it "
                "x.clone()"
            )
