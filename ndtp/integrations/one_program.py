"""All ranks of a grid as accelerate sees them: one process that trains one model on whole batches.

accelerate knows of data parallelism and of its own kinds of parallel models.  A model on a grid is none of these: it is
called with whole batches on every rank, sums its gradients itself, and is saved by all ranks together.  So accelerate
is told of a single process.  The rank stays: rank 0 logs and writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState, do_nothing

from ndtp.runtime.points import Point, Speaking, compare
from ndtp.runtime.process_grid import ProcessGrid

Function: TypeAlias = Callable[..., object]
PLACE = "ndtp_place"  # in accelerate's state, which goes where that is reset


def become_one_program(mesh: ProcessGrid, place: int | None = None) -> None:
    """From here on accelerate, whose state is there, takes the ranks for one process.

    They wait for each other all the same where code asks for that (`wait_for_everyone`, `main_process_first`).

    Args:
        place: among the processes, for code that asks an `Accelerator` or draws a seed for each device; the rank
            without.  Whether a rank is the main process, which writes, is that of the rank in any case.
    """
    rank = dist.get_rank()
    local = int(os.environ.get("LOCAL_RANK", rank))
    one: dict[str, object] = {
        "distributed_type": DistributedType.NO,
        "num_processes": 1,
        "process_index": rank,
        "local_process_index": local,
        "wait_for_everyone": Meeting(mesh),  # instead of the method, as these are
        **{
            f"on_{name}": partial(_where, f"is_{name}")
            for name in ("main_process", "local_main_process", "last_process")
        },
        "on_process": _on_process,
        "on_local_process": _on_local_process,
    }
    PartialState._shared_state.pop(PLACE, None)
    AcceleratorState._shared_state.pop(PLACE, None)
    if place is not None:
        one[PLACE] = place
        AcceleratorState.process_index = property(_place)  # type: ignore[attr-defined]  # instead of the entry
    PartialState._shared_state.update(one)
    if AcceleratorState._shared_state:
        AcceleratorState._shared_state.update(one)


def _place(state: AcceleratorState) -> int:
    known = vars(state)
    if "process_index" not in known:
        raise AttributeError("process_index")  # which accelerate says in its own words
    return int(known.get(PLACE, known["process_index"]))


# accelerate's decorators, which run on every process of a program that has one alone, as it is told of this one.  They
# are found in a state that is pickled.


def _where(name: str, function: Function | None = None) -> object:
    if function is None:
        return partial(_where, name)
    return function if getattr(PartialState(), name) else do_nothing


def _on_process(function: Function | None = None, process_index: int | None = None) -> object:
    if function is None:
        return partial(_on_process, process_index=process_index)
    return function if PartialState().process_index == process_index else do_nothing


def _on_local_process(function: Function | None = None, local_process_index: int | None = None) -> object:
    if function is None:
        return partial(_on_local_process, local_process_index=local_process_index)
    return function if PartialState().local_process_index == local_process_index else do_nothing


def read_everywhere(accelerator: Any) -> None:
    """Have every rank read whole batches by itself, those of an `IterableDataset` as well, which accelerate would have
    one process read for all that it knows of.
    """
    accelerator.dataloader_config.dispatch_batches = False


class Meeting:
    """Called on every rank of a grid, it returns when all of them have called it.

    Training arguments are pickled with it; what is read back from a file belongs to no grid, and returns at once.
    """

    def __init__(self, mesh: ProcessGrid | None = None) -> None:
        self.mesh = mesh

    def __call__(self) -> None:
        mesh, what = self.mesh, "meeting in wait_for_everyone"
        if mesh is None or mesh.grid.num_ranks == 1:
            return
        conversation = mesh.groups.conversation() if mesh.check is not False else None
        if conversation is None:
            dist.barrier(group=mesh.group(mesh.grid.nontrivial(mesh.grid.names)))
            return
        with Speaking(conversation, what):  # which names ranks that are elsewhere, and for which this one would wait
            compare(mesh, conversation, Point(what, None))

    def __deepcopy__(self, memo: object) -> Meeting:
        return self

    def __reduce__(self) -> Any:
        return Meeting, ()
