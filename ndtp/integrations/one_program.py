"""All ranks of a grid as accelerate sees them: one process that trains one model on whole batches.

accelerate knows of data parallelism and of its own kinds of parallel models.  A model on a grid is none of these: it is
called with whole batches on every rank, sums its gradients itself, and is saved by all ranks together.  So accelerate
is told of a single process.  The rank stays: rank 0 logs and writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import TENSOR_AXES, usual_scheme
from ndtp.errors import GridError
from ndtp.models.parallelize import parallelize
from ndtp.runtime.facts import Fact, hash_of, is_strided
from ndtp.runtime.points import Point, Speaking, compare
from ndtp.runtime.process_grid import ProcessGrid

# Of models of transformers, by which the samples of a batch are counted.
MAIN_INPUTS = (
    "input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "decoder_input_ids", "labels",
)  # fmt: skip
PLACE = "ndtp_place"  # in accelerate's state, which goes where that is reset
SAMPLE = 4096  # numbers of a tensor that are compared
GivenGrid = str | Mapping[str, int] | Grid | ProcessGrid


def become_one_program(mesh: ProcessGrid, place: int | None = None) -> None:
    """From here on accelerate, whose state is there, takes the ranks for one process.

    They wait for each other all the same where code asks for that (`wait_for_everyone`, `main_process_first`).

    Args:
        place: among the processes, for code that asks an `Accelerator` or draws a seed for each device; the rank
            without.  Whether a rank is the main process, which writes, is that of the rank in any case.
    """
    rank = dist.get_rank()
    local = int(os.environ.get("LOCAL_RANK", rank))
    one = {
        "distributed_type": DistributedType.NO,
        "num_processes": 1,
        "process_index": rank,
        "local_process_index": local,
        "wait_for_everyone": Meeting(mesh),  # instead of the method
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
        if self.mesh is not None and self.mesh.grid.num_ranks > 1:
            dist.barrier(group=self.mesh.group(self.mesh.grid.nontrivial(self.mesh.grid.names)))

    def __deepcopy__(self, memo: object) -> Meeting:
        return self

    def __reduce__(self) -> Any:
        return Meeting, ()


def mesh_of(grid: GivenGrid) -> ProcessGrid:
    """Of "z=2,x=2,y=2", axis sizes, a Grid, or a ProcessGrid itself.

    Raises:
        GridError: the text is no grid, or there are no ranks for it.
    """
    if isinstance(grid, ProcessGrid):
        return grid
    if isinstance(grid, str):
        grid = Grid(_parsed(grid))
    elif not isinstance(grid, Grid):
        grid = Grid(dict(grid))
    if not dist.is_initialized():
        raise GridError(
            f"ndtp_grid={grid}: there is no process group\n"
            "  fix: start the program with `torchrun --nproc-per-node "
            f"{grid.num_ranks}`, or call it by ndtp.testing.run(main, ranks={grid.num_ranks})"
        )
    return ProcessGrid(grid)


def _parsed(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        name, equals, size = part.partition("=")
        if part and not (name and equals and size.isdecimal()):
            raise GridError(f"ndtp_grid={text!r}: {part!r} is no axis with its size\n  fix: like z=2,x=2,y=2")
        if part:
            axes[name] = int(size)
    return axes


def on_grid(model: nn.Module, mesh: ProcessGrid, scheme: str | None, options: Mapping[str, Any] | None) -> nn.Module:
    """`parallelize`, unless the model is on a grid already."""
    if getattr(model, "ndtp_report", None) is not None:
        return model
    sizes = {axis: mesh.grid[axis] for axis in mesh.grid}
    return parallelize(model, mesh, scheme=scheme or usual_scheme(sizes), **dict(options or {}))


def data_axes(mesh: ProcessGrid) -> tuple[str, ...]:
    """Return the axes, such as `dp`, along which ranks have rows of their own."""
    return tuple(axis for axis in mesh.grid if axis not in TENSOR_AXES and mesh.grid[axis] > 1)


def share_of_loss(models: Iterable[nn.Module], mesh: ProcessGrid | None) -> float:
    """Return what a mean over a rank's rows is multiplied by, so that the gradients that ranks sum are the batch's.

    It is one where no axis splits rows, and for stock models of transformers, whose loss is that of all rows.
    """
    axes = () if mesh is None else data_axes(mesh)
    if mesh is None or not axes or not any(_has_own_losses(model) for model in models):
        return 1.0
    return 1.0 / mesh.grid.size(axes)


def _has_own_losses(model: nn.Module) -> bool:
    report = getattr(model, "ndtp_report", None)
    return report is not None and bool(report.losses)


def gathered_rows(result: object, mesh: ProcessGrid) -> Any:
    """The rows that ranks along the data axes have of tensors, one behind the other, on every rank; a collective."""

    def of_all(x: Any) -> object:
        if not isinstance(x, Tensor):
            return x
        mine = whole(x).detach()
        rows = [part if part.dim() else part[None] for part in of_data_ranks(mine.cpu(), mesh)]
        return torch.cat(rows).to(mine.device)

    return tree_map(of_all, result)


def of_data_ranks(mine: object, mesh: ProcessGrid) -> list[Any]:
    """What the ranks along the data axes have, in the order of their rows; a collective."""
    axes = data_axes(mesh)
    mine = tree_map(lambda x: whole(x).detach().cpu() if isinstance(x, Tensor) else x, mine)
    parts: list[Any] = [None] * mesh.grid.size(axes)
    dist.all_gather_object(parts, (mesh.grid.index(mesh.rank, axes), mine), group=mesh.group(axes))
    return [part for _, part in sorted(parts, key=itemgetter(0))]


def rows_here(inputs: object, mesh: ProcessGrid | None, batch_size: int | None = None) -> object:
    """Of a whole batch, the rows that this rank's model is called with: a share, where axes such as `dp` split rows.

    A batch that those axes do not divide is left whole for all of them: the mean of equal losses is the loss.

    Args:
        batch_size: of the loader, where it is known.

    Raises:
        MismatchError: ranks have other batches; the same on every rank.
    """
    if mesh is None:
        return inputs
    axes = data_axes(mesh)
    if not axes:
        return inputs
    _compare([x for x in _tensors_of(inputs) if x.dim()], mesh)
    count = number_of_samples(inputs, batch_size)
    if not count or count % mesh.grid.size(axes):
        return inputs
    rows = Layout(mesh.grid, axes).slices(mesh.rank, (count,))[0]
    return cut_rows(inputs, rows, count)


def number_of_samples(inputs: object, batch_size: int | None = None) -> int:
    """Return how many samples a batch has; 0 where that is not known.  A tensor of another length, such as a table,
    belongs to no sample.
    """
    sizes = [len(x) for x in _tensors_of(inputs) if x.dim()]
    if len(set(sizes)) > 1:
        named = [inputs.get(key) for key in MAIN_INPUTS] if isinstance(inputs, Mapping) else []
        main = next((x for x in named if isinstance(x, Tensor) and x.dim()), None)
        if main is not None:
            return len(main)
        return batch_size if batch_size in sizes else 0  # type: ignore[return-value]
    return sizes[0] if sizes else 0


def _hash_of(x: Tensor) -> Tensor | int:
    """Return a hash of integers, or of a sample of real numbers, which may be many."""
    if x.is_floating_point() or x.is_complex():
        x = x.detach().reshape(-1)
        x = x[:: -(-len(x) // SAMPLE)] if len(x) > SAMPLE else x
        x = torch.view_as_real(x) if x.is_complex() else x.double()
    return hash_of(x)


def _compare(tensors: Sequence[Tensor], mesh: ProcessGrid) -> None:
    """Compare whole batches, of which each rank takes its rows, between ranks."""
    conversation = mesh.groups.conversation() if mesh.check is not False else None
    if conversation is None:
        return
    shapes = [(tuple(x.shape), str(x.dtype)) for x in tensors]
    values = [_hash_of(x) for x in tensors if x.device.type == "cpu" and is_strided(x) and not x.is_quantized]
    what = "a batch of a loader, of which each rank takes its rows"
    facts = [Fact("tensors of the batch", shapes), Fact("values of the batch", values)]
    with Speaking(conversation, what):
        compare(mesh, conversation, Point(what, (shapes, values), facts=lambda: facts))


def _tensors_of(inputs: object) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors_of(part)]


def cut_rows(inputs: object, rows: slice, count: int) -> object:
    """Some of the rows of a batch of so many, in a container of its own."""
    if isinstance(inputs, Tensor):
        return inputs[rows] if inputs.dim() and len(inputs) == count else inputs
    if isinstance(inputs, Mapping):
        cut = {key: cut_rows(value, rows, count) for key, value in inputs.items()}
        return type(inputs)(cut)  # type: ignore[call-arg]
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(cut_rows(value, rows, count) for value in inputs)
    return inputs


def whole(result: Any) -> Any:
    """Results with the tensors that are split gathered; a collective."""
    if hasattr(result, "gathered"):
        return result.gathered()
    if isinstance(result, (list, tuple)):
        return type(result)(whole(part) for part in result)
    if isinstance(result, Mapping):
        return {key: whole(part) for key, part in result.items()}
    return result
